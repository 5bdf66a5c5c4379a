"""The receiving end: buckets are written over as soon as they were taken, and loaders may keep what they were given."""

from __future__ import annotations

import pytest
import torch

from megatron_gcpo.reshard.boxes import Box, part, volume, whole
from megatron_gcpo.reshard.cuts import cut
from megatron_gcpo.reshard.fingerprint import fingerprint
from megatron_gcpo.reshard.receiver import Receiver
from megatron_gcpo.reshard.wire import Piece, TensorSpec


class FusedModel:
    """Loads like vLLM: a layer is filled when all its tensors are there, until then what came is kept."""

    def __init__(self, layers: dict[str, tuple[str, ...]], rows: slice) -> None:
        self.layers, self.rows = layers, rows
        self.kept: dict[str, dict[str, torch.Tensor]] = {layer: {} for layer in layers}
        self.parameters: dict[str, torch.Tensor] = {}
        self.orders: list[str] = []

    def load(self, weights) -> None:
        for name, weight in weights:
            self.orders.append(name)
            layer = next(layer for layer, names in self.layers.items() if name in names)
            self.kept[layer][name] = weight
            torch.empty(weight[self.rows].shape, dtype=weight.dtype, device="meta").copy_(weight[self.rows])
            if len(self.kept[layer]) == len(self.layers[layer]):
                for part_name, part_weight in self.kept[layer].items():
                    target = torch.full(part_weight[self.rows].shape, torch.nan, dtype=part_weight.dtype)
                    target.copy_(part_weight[self.rows])
                    self.parameters[part_name] = target
                self.kept[layer].clear()


LAYERS = {"qkv": ("q", "k", "v"), "o": ("o",)}
TENSORS = {name: torch.randn(8, 6, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("qovk")}


def specs() -> list[TensorSpec]:
    return [TensorSpec(name=n, shape=(8, 6), dtype=t.dtype, word_bytes=8) for n, t in TENSORS.items()]


def send(receiver: Receiver, box: Box, elements_per_bucket: int) -> None:
    """All tensors' ``box``, cut small, with every bucket wiped after it was taken."""
    for index, tensor in enumerate(TENSORS.values()):
        for piece_box in cut(box, elements_per_bucket):
            data = part(tensor, whole(tensor.shape), piece_box).clone().view(-1).view(torch.uint8)
            piece = Piece(tensor=index, box=piece_box, offset=0, of_elements=volume(box))
            receiver.receive(specs(), [piece], data)
            data.fill_(255)


@pytest.mark.parametrize("elements", [100, 12, 8])
def test_parts_land_though_every_bucket_is_written_over(elements: int) -> None:
    model = FusedModel(LAYERS, slice(2, 6))
    receiver = Receiver(model.load, torch.device("cpu"))
    receiver.begin(whole=False, verify=True)
    box = ((2, 6), (0, 6))
    send(receiver, box, elements)
    assert model.parameters.keys() == TENSORS.keys()
    report = receiver.report()
    assert report["incomplete"] == []
    for spec in specs():
        assert torch.equal(model.parameters[spec.name], TENSORS[spec.name][2:6])
        assert report["marks"][spec.name] == fingerprint(TENSORS[spec.name][2:6], box, (8, 6), 8)


@pytest.mark.parametrize("elements", [100, 12, 8])
def test_whole_tensors_too(elements: int) -> None:
    model = FusedModel(LAYERS, slice(0, 8))
    receiver = Receiver(model.load, torch.device("cpu"))
    receiver.begin(whole=True, verify=True)
    send(receiver, ((0, 8), (0, 6)), elements)
    for name, tensor in TENSORS.items():
        assert torch.equal(model.parameters[name], tensor)
        assert receiver.report()["marks"][name] == fingerprint(tensor, ((0, 8), (0, 6)), (8, 6), 8)


def test_a_tensor_that_stays_incomplete_is_reported_and_never_loaded() -> None:
    model = FusedModel(LAYERS, slice(0, 8))
    receiver = Receiver(model.load, torch.device("cpu"))
    receiver.begin(whole=False, verify=True)
    piece = Piece(tensor=0, box=((0, 3), (0, 6)), offset=0, of_elements=48)
    receiver.receive(specs(), [piece], TENSORS["q"][:3].clone().view(-1).view(torch.uint8))
    assert receiver.report() == {"num_buckets": 1, "incomplete": ["q"], "marks": {}}
    assert model.orders == []
    receiver.begin(whole=False, verify=True)
    assert receiver.report() == {"num_buckets": 0, "incomplete": [], "marks": {}}


def test_a_model_that_wants_more_than_it_is_sent_is_an_error_that_names_the_tensor() -> None:
    model = FusedModel({"one": ("q",)}, slice(0, 8))
    receiver = Receiver(model.load, torch.device("cpu"))
    receiver.begin(whole=False, verify=False)
    piece = Piece(tensor=0, box=((0, 3), (0, 6)), offset=0, of_elements=18)
    with pytest.raises(ValueError, match=r"of 'q', of which only 18 elements were sent"):
        receiver.receive(specs(), [piece], TENSORS["q"][:3].clone().view(-1).view(torch.uint8))


def test_what_lands_changed_shows_in_the_marks() -> None:
    """The mark is taken of the parameter, not of what was received."""

    def load(weights) -> None:
        for _, weight in weights:
            target = torch.empty(8, 6)
            target[:, :3].copy_(weight[:, :3])
            target[:, 3:].copy_(weight[:, :3])  # half of it is loaded twice, the other half never

    receiver = Receiver(load, torch.device("cpu"))
    receiver.begin(whole=False, verify=True)
    piece = Piece(tensor=0, box=((0, 8), (0, 6)), offset=0, of_elements=48)
    spec = [TensorSpec(name="q", shape=(8, 6), dtype=torch.float32, word_bytes=4)]
    receiver.receive(spec, [piece], TENSORS["q"].clone().view(-1).view(torch.uint8))
    assert receiver.report()["marks"]["q"] != fingerprint(TENSORS["q"], ((0, 8), (0, 6)), (8, 6), 4)


def test_what_the_loader_let_go_of_is_not_copied_out_of_the_bucket() -> None:
    model = FusedModel({"one": ("q",), "fused": ("k", "o")}, slice(0, 8))
    receiver = Receiver(model.load, torch.device("cpu"))
    receiver.begin(whole=False, verify=False)
    both = [Piece(tensor=i, box=((0, 8), (0, 6)), offset=i * 192, of_elements=48) for i in range(2)]
    data = torch.cat([TENSORS["q"].view(-1), TENSORS["o"].view(-1)]).view(torch.uint8)
    receiver.receive(specs(), both, data)
    kept = [ref() for ref in receiver.given]
    assert [(arriving.name, arriving.num_owned) for arriving in kept] == [("o", 1)]
