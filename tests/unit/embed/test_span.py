import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gcpo.data.tasks import TASKS
from megatron_gcpo.embed import embedded_span

CASES = [
    # how the packaged tasks end
    ("split : 2 0 + 3 0 = 5 0 . answer 5 9", "split : 2 0 + 3 0 = 5 0 ."),
    ("use doubling ; answer 8 7", "use doubling ;"),
    ("add the tens. answer: 72", "add the tens."),
    # how language models end
    ("we add. The answer is 42.", "we add."),
    ("we add. So, the answer is x = 3.5 m.", "we add."),
    ("<think>a. b.</think>\nThus the final answer is $\\boxed{\\frac{1}{2}}$.", "<think>a. b.</think>"),
    ("By symmetry.\n**Final Answer:** 3.5", "By symmetry."),
    ("We get $$\\boxed{5}$$", "We get"),
    ("First $\\boxed{1}$, then $\\boxed{2}$", "First $\\boxed{1}$, then"),
    ("cut off in the \\boxed{7 + {3", "cut off in the"),
    ("x=1\n#### 12\n", "x=1"),
    ("<think>hmm</think><answer>5</answer>", "<think>hmm</think>"),
    # not an answer, or nothing but one
    ("The answer is tricky. We go slowly: 3+4=7", "The answer is tricky. We go slowly: 3+4=7"),
    ("Let me answer this. I go.", "Let me answer this. I go."),
    ("he could not answer correctly", "he could not answer correctly"),
    ("Since $$a$$ and $b$ hold", "Since $$a$$ and $b$ hold"),
    ("answer 5 9", "answer 5 9"),
    ("\\boxed{3}", "\\boxed{3}"),
    ("<think></think>\\boxed{3}", "<think></think>\\boxed{3}"),
    ("The answer is 3", "The answer is 3"),
    ("", ""),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_reasoning(text, expected):
    assert embedded_span(text, "reasoning") == expected


@pytest.mark.parametrize(("text", "_"), CASES)
def test_completion_is_all_of_it(text, _):
    assert embedded_span(text, "completion") == text


@given(
    st.lists(st.sampled_from(["a b", "answer", " ", "\n", ".", "\\boxed{", "}", "$", "####", "is", "7", "<answer>"]))
)
def test_never_blank_unless_the_completion_is(parts):
    text = "".join(parts)
    assert embedded_span(text, "reasoning").strip() or not text.strip()


@pytest.mark.parametrize("name", ["addition", "multiplication"])
def test_solutions_of_the_packaged_tasks_lose_their_answer_and_nothing_else(name):
    task = TASKS[name]()
    for problem in task.problems()[:20]:
        for _, text in task.solutions(problem):
            head, _, _ = text.rpartition("answer")
            assert embedded_span(text, "reasoning") == head.strip()


@pytest.mark.parametrize("text", [".answer is" * 30_000, "\n \t" * 50_000, "\\boxed{" * 30_000, "<answer>" * 30_000])
def test_hostile_texts_are_read_in_linear_time(text):
    """With patterns run over the whole text these take minutes, not milliseconds, and the suite would time out."""
    assert embedded_span(text, "reasoning").strip() or not text.strip()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("split : 2 0 + 4 0 = 6 0 and 7 + 5 = 1 2 . answer 7 2", "split : # + # = # and # + # = # ."),
        ("3.5 and 1,000 apples.\nThe answer is 4.", "# and # apples."),
        ("\\boxed{12}", "\\boxed{#}"),
        ("no number at all", "no number at all"),
    ],
)
def test_wording_is_the_reasoning_without_its_numbers(text, expected):
    assert embedded_span(text, "wording") == expected
