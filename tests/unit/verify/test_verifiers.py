"""What each verifier accepts, and that none of them can be argued with."""

from __future__ import annotations

import ast
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gcpo.config.records import VerifyConfig
from megatron_gcpo.data.tasks import TASKS, make_task
from megatron_gcpo.verify.base import Rejected, Sample
from megatron_gcpo.verify.pool import VerifierPool
from megatron_gcpo.verify.table import VERIFIERS, create
from megatron_gcpo.verify.verifiers import screen
from megatron_gcpo.verify.verifiers.extract import by_pattern, final_answer, last_boxed, last_tagged, normalise

from .support import group


def judged(name: str, answer: str, text: str, extras: dict[str, Any] | None = None, **options: Any) -> float:
    return create(name, options).judge(Sample("", answer, extras or {}, text))


@pytest.mark.parametrize("name", VERIFIERS)
def test_every_row_loads_with_its_defaults(name: str) -> None:
    assert create(name, {}) == create(name, {})


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{3}", "3"),
        (r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\\{b}}", r"a\\{b}"),
        (r"\fbox{x}", "x"),
        (r"\boxed{unclosed", None),
        ("none", None),
    ],
)
def test_last_boxed(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


@given(
    inner=st.recursive(
        st.sampled_from(["x", r"\{", r"\}", r"\frac", " ", r"\\"]),
        lambda s: st.lists(s, max_size=3).map("".join) | s.map(lambda t: "{" + t + "}"),
        max_leaves=10,
    ),
    before=st.text(max_size=20),
)
def test_a_box_of_balanced_braces_comes_back_whole(inner: str, before: str) -> None:
    assert last_boxed(f"{before}\\boxed{{{inner}}} done") == inner


def test_final_answer_prefers_tags_then_boxes_then_words() -> None:
    text = r"The answer is 1. \boxed{2} <answer> 3 </answer> answer: 4"
    assert final_answer(text) == "3"
    assert final_answer(r"\boxed{2} answer: 4") == "2"
    assert final_answer("The answer is 1.\nFinal answer: 5 apples\nbye") == "5 apples"
    assert final_answer("no idea") is None
    assert last_tagged("<answer>a</answer><answer>b</answer>") == "b"
    assert by_pattern(r"#### (\d+)", "#### 1\n#### 22") == "22"
    assert by_pattern(r"\d+", "1 and 22") == "22"
    assert by_pattern(r"x", "1") is None


@given(st.text(max_size=30))
def test_normalising_twice_changes_nothing_for_plain_words(text: str) -> None:
    words = " ".join(re.findall(r"[a-z]+", text.lower()))
    assert normalise(words) == words
    assert normalise(f" **{words.upper()}.** ") == words.strip() or not words


@pytest.mark.parametrize(
    ("answer", "text", "options", "reward"),
    [
        ("Paris", "<answer> paris. </answer>", {}, 1),
        ("Paris", "The answer is **Paris**", {}, 1),
        ("Paris", "Paris", {}, 0),
        ("Paris", "Paris", {"whole": True}, 1),
        ("Paris", "It is Paris", {"whole": True}, 0),
        ("Paris", "<answer>paris</answer>", {"case_sensitive": True}, 0),
        ("1234", r"\boxed{1,234}", {}, 1),
        ("12", r"\boxed{1,2}", {}, 0),
        ("7", "#### 6\n#### 7", {"pattern": r"#### (\d+)"}, 1),
        ("7", "<answer>7</answer>", {"pattern": r"#### (\d+)"}, 0),
        ("x", "", {}, 0),
    ],
)
def test_exact(answer: str, text: str, options: dict, reward: float) -> None:
    assert judged("exact", answer, text, **options) == reward


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("<answer>B</answer>", "B"),
        ("<answer>(b) the second</answer>", "B"),
        (r"\boxed{\text{C}}", "C"),
        (r"\boxed{C} and <answer>D</answer>", "D"),
        ("A is tempting, but the answer is B.", "B"),
        ("Answer: **C**", "C"),
        ("I choose option (D)", "D"),
        ("The answer is A. No, the answer is B", "B"),
        ("so it must be\nB)", "B"),
        ("so it must be\nB) because", "B"),
        ("A cat", None),
        ("<answer>A or B</answer>", None),
        ("<answer>ABCD</answer>", None),
        ("The answer is Bob", None),
        ("", None),
    ],
)
def test_choice(text: str, letter: str | None) -> None:
    right = {answer for answer in "ABCD" if judged("choice", answer, text, letters="ABCD")}
    assert right == ({letter} if letter else set())


def test_choice_wants_a_letter_to_compare_with() -> None:
    with pytest.raises(ValueError, match=r"letter of ABCD.*got 'Paris'"):
        create("choice", {"letters": "ABCD"}).prepare(Sample("", "Paris", {}, ""))
    with pytest.raises(ValueError, match="each letter on offer once"):
        create("choice", {"letters": "AAB"})


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("1/2", r"\boxed{0.5}", 1),
        (r"\frac{1}{2}", "so it is $0.5$.", 1),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
        (r"2\sqrt{3}", r"\boxed{2}", 0),
        ("x^2+1", r"\boxed{1 + x^2}", 1),
        ("x^2+1", r"\boxed{1}", 0),
        ("1,234", r"\boxed{1234}", 1),
        ("50%", r"\boxed{0.5}", 1),
        (r"\text{Tuesday}", r"\boxed{\text{Tuesday}}", 1),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
        ("[1,2)", r"\boxed{[1, 2]}", 0),
        ("3", "<answer>3</answer>", 1),
        ("3", r"\boxed{3}, no: \boxed{4}", 0),
        ("3", "", 0),
        ("3", "no idea", 0),
    ],
)
def test_math(answer: str, text: str, reward: float) -> None:
    assert judged("math", answer, text) == reward


def test_math_in_the_pool_survives_towers_of_powers() -> None:
    """Its own time limit could not stop them; the pool's deadline does."""
    tower = r"\boxed{9^{9^{9^{9}}}}"
    with VerifierPool(VerifyConfig(name="math", num_workers=1, timeout_s=3), table=VERIFIERS) as pool:
        verdict = pool.score([group([r"\boxed{\frac{2}{4}}", tower, r"\boxed{0.5}"], answer="1/2")])[0]
    assert verdict.statuses_G == ("ok", "timeout", "ok")
    assert verdict.rewards_G.tolist() == [1.0, 0.0, 1.0]


def test_packaged_tasks_in_the_pool() -> None:
    """Every demonstration of a few problems of every task is right, and wrong for another answer."""
    groups, expected = [], []
    for name in TASKS:
        task = make_task(name)
        first, second = task.split("train")[:2]
        texts = [d.text for problem in (first, second) for d in task.demonstrations(problem)]
        groups.append(group([*texts, "", "answer"], answer=task.answer(first), extras={"task": name}))
        expected.append([float(task.verify(task.answer(first), text)) for text in texts] + [0.0, 0.0])
        assert max(expected[-1]) > 0.99
        assert 0.0 in expected[-1][:-2]
    with VerifierPool(VerifyConfig(name="task", num_workers=2)) as pool:
        verdicts = pool.score(groups)
        assert [v.rewards_G.tolist() for v in verdicts] == [pytest.approx(paid) for paid in expected]
        assert set(pool.counts.values()) == {0}
        with pytest.raises(ValueError, match=r"set data\.train\.kind to task"):
            pool.score([group(["answer 1"], answer="1")])
        with pytest.raises(ValueError, match="Did you mean addition"):
            pool.score([group(["answer 1"], answer="1", extras={"task": "additon"})])


CODE = [
    "__import__('os').system('true')",
    "().__class__.__base__.__subclasses__()",
    "(lambda: 24)()",
    "[x for x in (1, 2)]",
    "f'{open}'",
    "(x := 5)",
    "open('/etc/passwd')",
    "exec('1')",
    "Symbol('x').func",
    "S('__import__(\"os\")')",
    "sympify('1')",
]


@pytest.mark.parametrize("dataset", sorted(screen.LITERALS | screen.FORMULAS))
@pytest.mark.parametrize("code", CODE)
def test_code_is_rejected_where_a_scorer_would_run_it(dataset: str, code: str) -> None:
    with pytest.raises(Rejected):
        screen.check(dataset, code)


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("countdown", "(25 + 3) * 4 - 7/2"),
        ("countdown", "3! + 2"),
        ("puzzle24", "5 - -19"),
        ("simple_integration", "x**3/3 + sin(2*x) + C"),
        ("intermediate_integration", "-exp(-x)*log(x) + sqrt(x) + C"),
        ("polynomial_multiplication", "2*x**2 - x*y + 1"),
        ("spiral_matrix", "1 2 3"),
        ("spiral_matrix", "[1, 2, -3]"),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]"),
        ("string_insertion", "ABBA"),
        ("binary_matrix", "0 1\n1 0"),
        ("chain_sum", "__import__('os')"),  # its scorer evaluates nothing
    ],
)
def test_answers_of_the_expected_kind_reach_the_scorer(dataset: str, answer: str) -> None:
    assert screen.check(dataset, answer)


@given(st.text(alphabet="0123456789+-*/().!, xC'\"_[]{}=:lambdoeviprt\n\\", max_size=40))
def test_what_passes_the_screen_has_no_code_in_it(answer: str) -> None:
    """Whatever Python could evaluate of it contains no attribute, no call but of a known function, no function body."""
    for dataset in ("countdown", "spiral_matrix"):
        try:
            passed = screen.check(dataset, answer)
            tree = ast.parse(answer.strip(), mode="eval")
        except (Rejected, SyntaxError, ValueError):
            continue
        assert passed
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Attribute | ast.Lambda | ast.JoinedStr | ast.NamedExpr | ast.comprehension)
            assert not isinstance(node, ast.Call) or (dataset == "countdown" and isinstance(node.func, ast.Name))


@pytest.mark.parametrize("name", ["exact", "choice"])
def test_long_hostile_text_is_read_in_linear_time(name: str) -> None:
    """CPU time of this process may grow with the length, not with its square: 30 times the text, well under 300 times."""

    def cpu_s(size: int) -> float:
        texts = [piece * size for piece in ("\\boxed{", "answer ", "<answer>", "(", "answer is ", "\\text{", " ", "{}")]
        verifier = create(name, {})
        start = time.process_time()
        for text in texts:
            verifier.judge(Sample("", "A", {}, text))
        return time.process_time() - start

    cpu_s(1000)
    assert cpu_s(30_000) < 300 * max(cpu_s(1000), 1e-3)
