"""Greedy text of a Hugging Face checkpoint, and its text after a trip through Megatron-Core.

    python -m examples.smollm2.generate show runs/smollm2/start
    python -m examples.smollm2.generate same runs/smollm2/start runs/smollm2/trip

``same`` loads the checkpoint into Megatron-Core, cut over two tensor-parallel processes, writes the weights back as a
Hugging Face checkpoint, and compares the greedy text of both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import logging as transformers_logging

SHOTS = "6 * 3 = 18\n23 + 5 = 28\n"
PROMPTS = ("The capital of France is", "Water boils when", f"{SHOTS}7 * 8 =", f"{SHOTS}38 + 7 =")
NEW_TOKENS = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["show", "same"])
    parser.add_argument("folders", type=Path, nargs="+")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    texts = [greedy(folder) for folder in arguments.folders]
    for prompt, text in zip(PROMPTS, texts[0], strict=True):
        print(f"  {prompt!r} -> {text!r}")
    if arguments.what == "same" and any(other != texts[0] for other in texts[1:]):
        print("the greedy texts differ")
        return 1
    if arguments.what == "same":
        print(f"the same text from {' and '.join(map(str, arguments.folders))}")
    return 0


def greedy(folder: Path) -> list[str]:
    """The continuations of PROMPTS, up to the end of a line."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    for prompt in PROMPTS:
        ids: Any = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            drawn = model.generate(**ids, do_sample=False, max_new_tokens=NEW_TOKENS)[0, ids["input_ids"].shape[1] :]
        texts.append(str(tokenizer.decode(drawn, skip_special_tokens=True)).split("\n")[0])
    return texts


if __name__ == "__main__":
    sys.exit(main())
