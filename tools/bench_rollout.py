"""Tokens per second of the embedded engine against transformers generate, on the quick start's size.

    OMP_NUM_THREADS=1 python tools/bench_rollout.py [--prompts 16] [--group-size 8] [--new-tokens 56]

Random weights, no stop token: both sides generate the same number of tokens. Best of several rounds, in CPU seconds.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

from megatron_gcpo.rollout import SampleRequest, Sampling
from megatron_gcpo.rollout.transformers_engine import TransformersEngine

CONFIG = Qwen3Config(
    vocab_size=104,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    pad_token_id=0,
    eos_token_id=None,
    bos_token_id=None,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=56)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).eval()
    rows = args.prompts * args.group_size
    engine = TransformersEngine(CONFIG, device=torch.device("cpu"), dtype=torch.float32, max_batch_rows=rows)
    engine.load_weights(model.state_dict().items())

    rng = random.Random(0)
    prompts = [tuple(rng.randrange(1, 104) for _ in range(rng.randint(8, 11))) for _ in range(args.prompts)]
    requests = [
        SampleRequest(prompt_token_ids=prompt, seed=p * args.group_size + g, max_new_tokens=args.new_tokens)
        for p, prompt in enumerate(prompts)
        for g in range(args.group_size)
    ]
    width = max(map(len, prompts))
    padded = [[0] * (width - len(r.prompt_token_ids)) + list(r.prompt_token_ids) for r in requests]
    ids = torch.tensor(padded)
    mask = (ids != 0).long()
    options = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=args.new_tokens,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )

    def generate() -> None:
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=options)
        torch.stack(out.logits, 1).log_softmax(-1)  # the log-probs that the engine returns with its tokens

    sides = {"transformers generate": generate, "embedded engine": lambda: engine.generate(requests, Sampling())}
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(args.rounds + 1):
        for name, run in sides.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
    tokens = rows * args.new_tokens
    for name, seconds in best.items():
        ratio = best["transformers generate"] / seconds
        print(
            f"{name:24s} {tokens / seconds:10.0f} tokens/CPU-s   {seconds:.3f} CPU-s for {tokens} tokens   {ratio:.2f}x"
        )


if __name__ == "__main__":
    main()
