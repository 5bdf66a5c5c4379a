"""The start-up contract: before the first step, engine and trainer must say the same of the same tokens.

``check.check_contract(run)`` draws short completions of real prompts, compares what the engine reported, what it says when
asked to score them, and what the trainer computes. A gap above rollout.max_logprob_gap ends the run with the cause that
explains it: temperature, sampling mask, tokenizer, position ids, precision or weights.

diagnosis.py is pure: from measurements to ranked causes. measure.py takes the measurements on all ranks, probe.py draws the
tokens, switches.py changes one thing of the trainer for the length of a measurement, faults.py plants faults for the tests.
"""
