"""How good a policy is, and how many ways it has of being good: avg@k, pass@k, distinct strategies, diversity."""

from megatron_gcpo.evaluate.diversity import distinct_at_k, effective_number, effective_rank, vendi_score
from megatron_gcpo.evaluate.passk import pass_at_k
from megatron_gcpo.evaluate.report import PromptEval, evaluation_table, per_prompt, summarize_evals
from megatron_gcpo.evaluate.run import Labeller, measure, task_labeller

__all__ = [
    "Labeller",
    "PromptEval",
    "distinct_at_k",
    "effective_number",
    "effective_rank",
    "evaluation_table",
    "measure",
    "pass_at_k",
    "per_prompt",
    "summarize_evals",
    "task_labeller",
    "vendi_score",
]
