"""How good a policy is, and how many ways it has of being good: avg@k, pass@k, distinct strategies, diversity."""

from megatron_gcpo.evaluate.diversity import distinct_at_k, effective_number, effective_rank, vendi_score
from megatron_gcpo.evaluate.passk import mean_pass_at_k, pass_at_k
from megatron_gcpo.evaluate.report import EvalReport, PromptEval, report_table, summarize_evals
from megatron_gcpo.evaluate.run import Labeller, evaluate, measure

__all__ = [
    "EvalReport",
    "Labeller",
    "PromptEval",
    "distinct_at_k",
    "effective_number",
    "effective_rank",
    "evaluate",
    "mean_pass_at_k",
    "measure",
    "pass_at_k",
    "report_table",
    "summarize_evals",
    "vendi_score",
]
