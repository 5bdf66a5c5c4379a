import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gcpo.data.tasks import SPLITS, TASKS, make_task
from megatron_gcpo.data.tasks.base import final_number, join_digits

NAMES = sorted(name for name in TASKS if not TASKS[name].graded)
ADDITION_DEMONSTRATIONS = {
    "split": "split both into tens and ones : 2 0 + 4 0 = 6 0 and 7 + 5 = 1 2 . together 6 0 + 1 2 = 7 2 . answer 7 2",
    "round": "round the second number up to 5 0 : 2 7 + 5 0 = 7 7 . that is 5 too many , so 7 7 - 5 = 7 2 . answer 7 2",
    "count": "count up in jumps of ten : 2 7 , 3 7 , 4 7 , 5 7 , 6 7 . then 5 more makes 7 2 . answer 7 2",
    "write": "write them in columns : right 7 + 5 = 1 2 , keep 2 carry 1 . left 2 + 4 + 1 = 7 . answer 7 2",
    "move": "move 3 from one number to the other : 2 7 + 3 = 3 0 and 4 5 - 3 = 4 2 . now 3 0 + 4 2 = 7 2 . answer 7 2",
}


def test_addition_keeps_its_wording():
    """Measured results depend on these very words."""
    task = make_task("addition")
    assert task.prompt_text((27, 45)) == "what is 2 7 + 4 5 ?"
    assert {d.strategy: d.text for d in task.demonstrations((27, 45))} == ADDITION_DEMONSTRATIONS
    assert task.strategies == tuple(ADDITION_DEMONSTRATIONS)


def equations(text):
    """Every "a op b = c" a demonstration states, and every chain "a + b + c = d"."""
    text = join_digits(text)
    return re.findall(r"(\d+(?: [+*-] \d+)+) = (\d+)", text)


@pytest.mark.parametrize("style", ["words", "natural"])
@pytest.mark.parametrize("name", NAMES)
def test_every_demonstration_is_right_accepted_and_recognized(name, style):
    task = make_task(name, {"style": style})
    # style changes the spaces between digits only: a part of the problems shows it
    for problem in task.problems()[:: 1 if style == "words" else 9]:
        answer = task.answer(problem)
        demonstrations = task.demonstrations(problem)
        assert len({d.text for d in demonstrations}) == len(demonstrations) >= 2
        for d in demonstrations:
            assert task.verify(answer, d.text)
            assert task.strategy(d.text) == d.strategy
            assert d.strategy in task.strategies
            # parsing equations is slow: a thirteenth of the problems has all their carries
            for left, right in equations(d.text) if sum(problem) % 13 == 0 else ():
                assert eval(left) == int(right), d.text


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_last_number_or_a_cut_is_rejected(name):
    """The last number of every demonstration decides; without the last word there is no answer at all."""
    task = make_task(name)
    for problem in task.problems()[::11]:
        answer = task.answer(problem)
        for d in task.demonstrations(problem):
            words = d.text.split()
            last = max(i for i, word in enumerate(words) if word.isdigit())
            for digit in "0123456789":
                changed = " ".join([*words[:last], digit, *words[last + 1 :]])
                assert task.verify(answer, changed) == (digit == words[last])
            assert not task.verify(answer, " ".join(words[:last]))
            assert not task.verify(answer, d.text + " and then")


@pytest.mark.parametrize("name", NAMES)
def test_answers_of_other_problems_are_rejected(name):
    task = make_task(name)
    problems = task.problems()[:: max(1, len(task.problems()) // 40)]
    for a, b in itertools.permutations(problems, 2):
        if task.answer(a) != task.answer(b):
            assert not task.verify(task.answer(a), task.demonstrations(b)[0].text)


@settings(deadline=None)
@given(st.text(max_size=60) | st.from_regex(r"(answer|add|done|to get|and|[0-9 .:=-]){0,30}"))
def test_verify_and_strategy_are_total(text):
    for name, answer in (("addition", "72"), ("multiplication", "96"), ("countdown", "2 3 7 = 27")):
        task = TASKS[name]
        assert task.verify(answer, text) in (True, False)
        assert isinstance(task.strategy(text), str)


def test_hostile_lengths_cost_nothing():
    """Quadratic parsing of these would take minutes; the suite would notice."""
    for junk in ("answer " * 200_000, "1 " * 500_000, "answer" + " " * 1_000_000, "add 1 and " * 100_000, "." * 10**6):
        for name, answer in (("addition", "72"), ("multiplication", "96"), ("countdown", "2 3 7 = 27")):
            assert not TASKS[name].verify(answer, junk)
            assert not TASKS[name].verify(answer, junk + "x")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("answer 7 2", 72),
        ("so the answer is 72.", 72),
        ("27 + 45 = 72\nAnswer: 72\n", 72),
        ("answer 7 2 . answer 7 3", 73),
        ("answer 7 2 or so", None),
        ("answer", None),
        ("reanswer 7 2", None),
        ("answer - 7 2", None),
        ("answer 72,5", None),
        ("answer ٧٢", None),
        ("", None),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("add 7 and 2 to get 9 . multiply 9 and 3 to get 2 7 . done", True),
        ("Let me think. 7 + 2 = 9\nAdd 7 and 2 to get 9. Multiply 9 and 3 to get 27. Done.", True),
        ("add 7 and 2 to get 9 . multiply 9 and 3 to get 2 7", False),  # not done
        ("add 7 and 2 to get 9 . multiply 9 and 3 to get 2 8 . done", False),  # false arithmetic
        ("add 7 and 2 to get 9 . done", False),  # not all numbers
        ("multiply 9 and 3 to get 2 7 . done", False),  # a number it was not given
        ("add 7 and 7 to get 1 4 . add 1 4 and 3 to get 1 7 . done", False),  # a number used twice
        ("add 7 and 2 to get 9 . multiply 9 and 3 to get 2 7 . add 2 7 and 0 to get 2 7 . done", False),
        ("add 7 and 3 to get 1 0 . multiply 1 0 and 2 to get 2 0 . done", False),  # another target
        ("2 7 . add 7 and 2 to get 9 . multiply 9 and 3 to get 2 7 . done", False),  # words that are no step
        ("done", False),
    ],
)
def test_countdown_checks_every_step(text, right):
    assert TASKS["countdown"].verify("2 3 7 = 27", text) is right


def brute_force_targets(numbers):
    """Every value that some order, some operators and some bracketing of all numbers give, by recursion over splits."""
    if len(numbers) == 1:
        return {numbers[0]}
    values = set()
    for size in range(1, len(numbers)):
        for chosen in itertools.combinations(range(len(numbers)), size):
            left = brute_force_targets(tuple(numbers[i] for i in chosen))
            right = brute_force_targets(tuple(n for i, n in enumerate(numbers) if i not in chosen))
            for a, b in itertools.product(left, right):
                values |= {a + b, a * b} | ({a - b} if a > b else set())
    return values


def test_countdown_finds_every_target():
    task = make_task("countdown", {"highest": 6, "min_solutions": 1, "largest": 10**6})
    targets = {}
    for *numbers, target in task.problems():
        targets.setdefault(tuple(numbers), set()).add(target)
    for numbers in itertools.combinations_with_replacement(range(1, 7), 3):
        assert targets[numbers] == brute_force_targets(numbers)


@pytest.mark.parametrize("name", NAMES)
def test_splits_are_disjoint_complete_and_stable(name):
    task = make_task(name)
    parts = {split: task.split(split) for split in SPLITS}
    assert sorted(sum(parts.values(), ())) == sorted(task.problems())
    assert len(parts["heldout"]) == 64
    assert len(parts["train"]) - len(parts["sft"]) in (0, 1)
    assert parts == {split: make_task(name, {"weights": None}).split(split) for split in SPLITS}
    assert set(task.split("heldout")) != set(make_task(name, {"split_seed": 2}).split("heldout"))
    sized = make_task(name, {"heldout": 10, "sft": 5})
    assert [len(sized.split(split)) for split in ("heldout", "sft")] == [10, 5]


def test_heldout_problems_are_pinned():
    """Numbers of different versions are comparable only on the same held-out problems."""
    assert make_task("addition").split("heldout")[:4] == ((12, 39), (57, 45), (35, 76), (22, 16))


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_unique_and_vocabulary_is_exact(name):
    task = make_task(name)
    problems = task.problems()
    assert len({task.problem_id(p) for p in problems}) == len(problems)
    used = set()
    for p in problems:
        used.update(task.prompt_text(p).split(), *(d.text.split() for d in task.demonstrations(p)))
    assert used == set(task.vocabulary)
    assert len(set(task.vocabulary)) == len(task.vocabulary)


def test_natural_style_reads_like_text():
    assert make_task("addition", {"style": "natural"}).prompt_text((27, 45)).startswith("What is 27 + 45?")
    text = make_task("addition", {"style": "natural"}).demonstrations((27, 45))[0].text
    assert text.startswith("split both into tens and ones : 20 + 40 = 60 and 7 + 5 = 12 .")


def test_weights_reach_the_demonstrations():
    task = make_task("addition", {"weights": {"count": 0, "move": 2.5}})
    assert [d.weight for d in task.demonstrations((27, 45))] == [1, 1, 0, 1, 2.5]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("additon", {}, "Did you mean addition"),
        (None, {}, "use one of addition"),
        ("addition", {"held_out": 3}, "no option 'held_out'.*Did you mean heldout"),
        ("addition", {"heldout": "64"}, "heldout is '64', expected a whole number"),
        ("addition", {"heldout": True}, "expected a whole number"),
        ("addition", {"sft": 1.5}, "expected a whole number"),
        ("addition", {"heldout": -1}, "must not be negative"),
        ("addition", {"low": 5}, "11 <= low"),
        ("addition", {"style": "prose"}, "use words or natural"),
        ("addition", {"weights": [1, 2]}, "expected a mapping"),
        ("addition", {"weights": {"splt": 1}}, "it has split, round"),
        ("addition", {"weights": {"split": -1}}, ">= 0"),
        ("multiplication", {"multiplier_low": 1}, "2 <= multiplier_low"),
        ("countdown", {"numbers": 7}, "use 2, 3 or 4"),
        ("countdown", {"highest": 0}, "1 <= highest"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_task(name, options)


def test_bad_splits_are_refused():
    with pytest.raises(ValueError, match="no split 'test': use sft, train, heldout"):
        make_task("addition").split("test")
    with pytest.raises(ValueError, match="has 252 problems, fewer than heldout 64 \\+ sft 200"):
        make_task("multiplication", {"sft": 200}).split("train")
