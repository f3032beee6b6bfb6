import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft_visual.errors import ConfigError
from lightrft_visual.rewards.functions.answers import (
    Choice,
    Exact,
    Numeric,
    final_answer,
    last_boxed,
    last_number,
    tagged_answer,
)
from lightrft_visual.rewards.functions.format import Format
from lightrft_visual.rewards.functions.math import Math
from lightrft_visual.runtime.usercode.calls import Failed


@pytest.mark.parametrize(
    ("response", "reference", "wanted"),
    [
        ("Red.", "red", 1),
        ("<think>blue</think><answer>red</answer>", "red", 1),
        ("so \\boxed{red}", "red", 1),
        ("b", ["a", "b"], 1),
        ("anything", None, None),
        ("3", 3, 1),
        ("", "?", 0),
        ("!!", "*", 0),
        ("<answer></answer>", "()", 0),
        ("<answer> ?\n</answer>", "?", 1),
    ],
)
def test_exact(response, reference, wanted):
    assert Exact()([response], [reference]) == [wanted]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["<answer>", "<ANSWER>", "</answer>", "</an\u017fwer>", "<", "/answer>", "a", " ", "\n"]))
)
def test_the_tagged_answer_is_the_last_match_of_the_plain_pattern(pieces):
    found = re.findall("<answer>(.*?)</answer>", "".join(pieces), re.DOTALL | re.IGNORECASE)
    assert tagged_answer("".join(pieces)) == (found[-1].strip() if found else None)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("scorer", "right"), [(Exact(tagged=True), "3"), (Numeric(), "3"), (Choice("ABC"), "B")])
def test_a_response_that_repeats_an_opening_tag_is_scored_in_time_that_grows_with_its_length(scorer, right):
    looped = "<answer>\n" * 200_000
    assert scorer([looped, f"<answer>{right}</answer>" + looped], [right, right]) == [0, 1]


def test_exact_takes_a_whole_number_that_a_gap_in_its_column_made_a_float():
    assert Exact()(["3", "3.0", "2.5", "2"], [3.0, 3.0, 2.5, [1.0, 2.0]]) == [1, 1, 1, 1]


def test_references_may_be_tagged_as_r1_vs_and_vlm_r1s_data_are():
    said = ["<think>x</think><answer>yellow</answer>", "yellow", "red"]
    assert Exact()(said, ["<answer> yellow </answer>"] * 3) == [1, 1, 0]
    assert Choice()(["B", "A"], ["<think>A or B?</think> <answer> B </answer>"] * 2) == [1, 0]
    assert Numeric()(["3"], [["<answer> 3 </answer>", "<answer>4</answer>"]]) == [1]


def test_exact_of_tagged_answers_only_or_as_is():
    responses = ["<answer> 3 </answer>", "3", "<answer>3", "<think> 3 </think> <answer>2</answer>"]
    assert Exact(tagged=True)([*responses, "3"], [*["3"] * 4, None]) == [1, 0, 0, 0, None]
    assert Exact(normalised=False)(["Red", "red "], ["red", "red"]) == [0, 1]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1,234.5 apples", 1234.5),
        ("3-2", 2),
        ("-2e3", -2000),
        ("12%", 0.12),
        ("none", None),
        (".5", 0.5),
        ("9. ", 9),
        *((text, None) for text in ("5/4", "\\frac34", "3/(4)", "5 : 4", "\\frac{\\pi}{4}", "50%/2")),
        ("5 / 4", None),
        (r"\frac{1}{4}", None),
        ("12:30", None),
        ("Step 1: 5", 5),
        ("Answer:5", 5),
    ],
)
def test_last_number(text, wanted):
    assert last_number(text) == wanted


SIGNED = ["−3", "–3", "﹣3", "－3", "The answer is −3.", "x = - 3", "x = – 3", r"x =-\,3", "x = −\u20093"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        *((text, -3) for text in (*SIGNED, "(- 3)", "**- 3**", r"x \approx-3", "x > −3", "答案是-3", "5\n-3")),
        *(
            (text, 3)
            for text in ("5 - 3", "5–3", "5 − 3", "2024-11-3", "x - 3", "COVID-3", "2\n- 3", "so:\n- 3", "- 3")
        ),
        *(
            (text, 42)
            for text in ("**Answer** – 42", "**Sum:** - 42", "<b>Sum</b> – 42", "Sum: - 42", "$x$ - 42", "Step 1 – 42")
        ),
        *((text, 1234) for text in ("1\u202f234", "1\u00a0234", "1\u2009234", r"1\,234", "1{,}234")),
        ("12\u202f345\u202f678", 12345678),
        *((text, 2024) for text in ("5\u00a02024", r"(1,\,2024)")),
        *(
            (text, 300)
            for text in (
                "in 2019\u00a0300 people",
                r"$2024\,300$",
                r"(1,\,300)",
                "0.123\u2009300",
                "1,024\u00a0300",
                "at 3:00\u00a0300 m",
            )
        ),
        *((text, None) for text in ("10^3", "10^{-3}", "3×10^2", "12 cm^2", r"12 m\,s^{-2}", "x^(2)")),
        *((text, 9) for text in ("x^2 = 9", "3^2 is 9", "9 cm²")),
    ],
)
def test_signs_groups_of_digits_and_powers_as_people_write_them(text, wanted):
    assert last_number(text) == wanted


def test_numeric_takes_a_minus_of_unicode_for_a_sign():
    assert Numeric()(["The answer is −3."] * 3, ["-3", "3", "−3"]) == [1, 0, 1]


@pytest.mark.parametrize("said", SIGNED)
def test_math_takes_a_minus_of_unicode_or_apart_from_its_number_for_a_sign(said):
    from lightrft_visual.rewards.functions.math_worker import verify_answer

    for form in ("%s", "<answer>%s</answer>", r"\boxed{%s}"):
        assert [verify_answer(form % said, [number]) for number in ("-3", "3", "−3")] == [1, 0, 1]


@pytest.mark.parametrize("said", [r"25\%", "25 %", r"$25\,\%$", "２５％", r"\boxed{25\%}"])
def test_numeric_and_math_read_a_percent_sign_of_latex_or_apart_from_its_number(said):
    from lightrft_visual.rewards.functions.math_worker import verify_answer

    assert Numeric()([said] * 3, ["25%", "0.25", r"25 \%"]) == [1, 1, 1]
    assert verify_answer(said, ["25%"]) == verify_answer(said, ["1/4"]) == 1
    assert verify_answer("0.25", [r"25\%"]) == verify_answer("0.25", ["25 %"]) == 1


@pytest.mark.parametrize(
    "said",
    [
        *("The answer is 42 – 3 more than 39", "Step 1 – 42", "<answer>42 – so it is</answer>"),
        *(
            "**Answer** – 42",
            "**Area** - 42 cm",
            "<b>Answer</b> – 42",
            "Answer: - 42",
            r"1 – 2 is less: \boxed{42}",
            "- 42 apples",
        ),
    ],
)
def test_math_takes_a_dash_among_words_for_no_minus(said):
    from lightrft_visual.rewards.functions.math_worker import verify_answer

    assert verify_answer(said, ["42"]) == 1 and verify_answer("So x = – 42", ["42"]) == 0
    assert verify_answer("The answer is $x – 3$", ["x – 3"]) == 1


@pytest.mark.parametrize(
    ("text", "wanted"), [("Circle3 and Cube2", 2), ("apple5", 5), ("Table1", 1), ("e", None), ("1.e5", 5), ("+.", None)]
)
def test_a_number_after_a_letter_e_is_read_without_it(text, wanted):
    assert last_number(text) == wanted


def test_numeric():
    responses, references = ["about 100.5", "7", "no", "1", "2", "2"], ["100", "8", "3", "three", ["1", "2"], None]
    assert Numeric(tolerance=0.01)(responses, references) == [1, 0, 0, None, 1, None]


@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("The answer is B because A is wrong", "B"),
        ("Answer: (C)", "C"),
        ("the answer is a dog", None),
        ("\\boxed{D}", "D"),
        ("\\boxed{\\text{B}}", "B"),
        ("**Answer:** B", "B"),
        ("The final answer is $B$", "B"),
        ("The correct answer is B. Option D shows a square.", "B"),
        ("The answer is B, because option A is too small.", "B"),
        ("Option A is too small, so I take option C.", "C"),
        ("The answer is $B = 2\\pi r$, so (D)", "D"),
        ("Answer: $E = mc^2$ (B)", "B"),
        ("Is the answer A? No. So option B.", "B"),
        ("Answer A is incorrect, therefore the correct option is C", "C"),
        ("So we choose $(B)$.", "B"),
        ("So it is $\\textbf{(B)}$.", "B"),
        ("(A) is 3, so it must be $(B)$.", "B"),
        ("The area is $12$ (C) $\\square$", "C"),
        ('The answer is "C".', "C"),
        ("The answer is “C”", "C"),
        ("So the answer should be C, not (D)", "C"),
        ("Ans: C", "C"),
        ("Fans: A crowd", None),
        ("The answer is Bézier, which is (C).", "C"),
        ('The answer is "A cat on a mat", that is (B).', "B"),
        ('We consider option "A" but it is wrong, so (B)', "B"),
        ("答案是C。选项A错误。", "C"),
        ("答案：A。选项B、C有误", "A"),
        ("选C。选项A不对。", "C"),
        ("挑选A方案后，得到(C)", "C"),
        ("我首选A公司, (B)", "B"),
        *((text, "B") for text in ("（B）", "B）", "Ｂ", "答案是B", "答案：B", "答案为 B。", "故选：B", "我选B")),
    ],
)
def test_choice_letter(response, wanted):
    assert Choice("ABCD").letter(final_answer(response)) == wanted


def test_choice():
    assert Choice()(["B", "A", "?", "C"], ["b", "B", "A", None]) == [1, 0, 0, None]
    assert Choice()(["B", "B", "B", "?"], [1, "a cat", ["a cat", "B"], ["1", "C"]]) == [None, None, 1, 0]
    with pytest.raises(ConfigError):
        Choice("A1")


def test_format_of_a_response_that_repeats_its_tags_is_read_once():
    assert Format()(["<think>" + "</think><answer>" * 60_000, "<think>a</think><answer>4 " * 60_000]) == [0, 0]


def test_format_reads_the_response_alone():
    good = "<think>x</think>\n<answer>y</answer>"
    assert Format()([good, "y", good + " more"]) == [1, 0, 0]
    assert Format(r"\d+")(["12", "12a"]) == [1, 0]
    with pytest.raises(ConfigError, match="regular expression"):
        Format("(")


def test_last_boxed_is_balanced():
    assert last_boxed(r"\boxed{1} and \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1") is None


def test_math_equivalence_and_time_limit():
    score = Math(seconds=2.0)
    try:
        answers = ["$\\frac{1}{2}$", "\\boxed{0.5}", "7", "\\boxed{(1, 2)}", "x"]
        assert score(answers, ["0.5", "\\frac12", "8", "(1,2)", None]) == [1, 1, 0, 1, None]
        two = [
            "<answer>3</answer> or \\boxed{4}",
            "It is $4$. <answer>$3$</answer>",
            "\\boxed{4} <answer>\\boxed{3}</answer>",
        ]
        assert score(two * 2, ["3"] * 3 + ["4"] * 3) == [1, 1, 1, 0, 0, 0]  # the last in tags is the one that counts
        (hostile, after) = score(["\\boxed{9^{9^{9^{9^9}}}}", "4"], ["3", "4"])
        assert isinstance(hostile, Failed) and "no result within 2 s" in hostile.reason
        assert after == 1
    finally:
        score.close()


@pytest.mark.parametrize("said", [r"\boxed{%s}", "<answer>%s</answer>"])
def test_math_of_a_bare_expression_is_not_its_leading_number(said):
    from lightrft_visual.rewards.functions.math_worker import verify_answer

    for whole, part in [
        (r"8\sqrt{3}", "8"),
        ("2x+1", "2"),
        (r"3\pi", "3"),
        ("3 and 4", "4"),
        ("3 pi", "3"),
        ("7 x", "7"),
    ]:
        assert verify_answer(said % part, [whole]) == 0
        assert verify_answer(said % whole, [whole]) == 1
    assert verify_answer(r"<answer>8\sqrt{2}</answer>", ["8"]) == 0
    measured = (
        "7km/h",
        "7mL",
        "¥7",
        "7-inch",
        "x-coordinate: 7",
        "7 N*m",
        "7th",
        "7 cm^3",
        "7 m/s^2",
        "7 N",
        "€7",
        "about 7",
        "length = 7 cm",
        "June 7",
        "7 (approx)",
    )
    for reference in ("7 dollars", "7 m/s", "7 cm", "$7", *measured):
        assert verify_answer(said % "7", [reference]) == 1
    for answer in ("**7**", "7 m^2", "**7kg**"):
        assert verify_answer(f"<answer>{answer}</answer>", ["7"]) == 1
    assert verify_answer("<answer>3 pi</answer>", [r"3\pi"]) == 1
    assert verify_answer("<answer>I think 7</answer>", ["7"]) == verify_answer("That makes 7 dollars.", ["7"]) == 1
