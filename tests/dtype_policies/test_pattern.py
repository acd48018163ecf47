"""Keys of a map: what is refused, what is bounded, and that the index finds what trying every pattern finds."""

from __future__ import annotations

import multiprocessing
import pickle
import re
import warnings

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from narrowcast.dtype_policies import runaway
from narrowcast.dtype_policies.expression import complement, overlap, parse, union
from narrowcast.dtype_policies.pattern import MAX_KEY_LENGTH, MAX_PATH_LENGTH, USUAL_PATH_LENGTH, Pattern, PatternIndex
from narrowcast.dtype_policies.runaway import RunawayError, estimate_seconds
from narrowcast.errors import PatternError, PolicyError
from tests.dtype_policies.expressions import AMBIGUOUS, EXPRESSIONS, PATHS, Matcher, TooManyError, worst_texts

ORDINARY = [
    "",
    ".*",
    "encoder/dense",
    r"encoder/layer/\d+/.*",
    r".*/(q|k|v)_proj",
    r".*/(query|key|value)",
    r"(layer/\d+/)+x",
    r".*/7/(attn|mlp)/.*_proj",
    r".*a.*b.*",
    r".*layer.*attention.*query.*",
    r".*/attention/.*/dense",
    r".*/(k|v)_proj/.*",
    r".*\.?(up|down)_proj",
    r".*\b(q|k|v)\b.*",
    r"(?i).*norm.*",
    r"(?i).*layer.*norm.*",
    r"(?!.*head).*",
    r"(?!.*(lm_head|norm)).*proj.*",
    r"(?i)(?!.*lm_head)(?!.*norm).*",
    r"(.*/)?query",
    r"[a-z]+(/[a-z]+)*",
    r"(encoder|decoder)/layer/[0-9]{1,2}/.*",
    r"(?!.*lm_head).*",
    r"(?i).*LayerNorm",
    r"model/layers/(\d|1\d|2[0-3])/.*",
    r"model/layers/([0-9]|1[0-5])/.*",
    r"^encoder/.*$",
    r"([^/]+/)*dense",
    r"(\d{1,3}\.){3}\d{1,3}",
    r"(?P<block>\d+)/.*/(?P=block)",
    r"a{1000}",
    "|".join(f"model/layers/{i}/mlp" for i in range(40)),
]

RUNAWAY = [
    "(a+)+x",
    "([a-z]+/?)+[0-9]",
    "(a|a)*b",
    "(a|ab|b)*c",
    "(.*)*x",
    "(.*/)*x",
    "(a*)*b",
    "(a*b*)*c",
    "((a?)*b)*c",
    "((a*)?b)*c",
    "(?:a.*b)*c",
    r"([\w.]+/?)+!",
    r"(\w+\s?)*$",
    ".*.*.*.*.*x",
    ".*.*.*.*x",
    ".*.*.*.*[bc]",
    "(a?){30}a{30}",
    "a?" * 30 + "b",
    "(?:a|ab?)" * 40 + "c",
    "(x+x+)+y",
    "(a|b|ab)*c",
    r"(?:(\w)\1*)+!",
    "(?:(?=a)a)*b",
    r"^(([a-z])+.)+[A-Z]([a-z])+$",
]

# Each of these took seconds on a path of 1,024 characters, or could: three parts that can stop anywhere, in disguise.
# They are looked up on paths of usual length only.
CUBIC = [
    ".*.*.*x",
    ".*.*.*[bc]",
    ".*a.*b.*c.*",
    ".*?.*?.*?[bc]",
    r"\w*?\w*?\w*?[!?]",
    "(.*)(.*)(.*)[bc]",
    "(?i)[ak]*[ak]*[ak]*[bc]",
    "(?:a|b)*(?:a|b)*(?:a|b)*[cd]",
    "(a)*(a)*(a)*[cd]",
    "(?:.*a)?(?:.*a)?(?:.*a)?[cd]",
    "(?:.*a){3}[cd]",
    ".*(?=a).*(?=a).*[bc]",
    ".*(?!b).*(?!b).*[bc]",
    r".*\b.*\b.*[!?]",
    r".*\B.*\B.*[!?]",
    "(?!.*a.*a.*[bc]).*",
    "a{0,1000}a{0,1000}a{0,1000}[bc]",
]

# The same, by what a look-around, a reference or a least count costs.
CUBIC_TOO = [".*(?=.*(?=.*[bc])).*", ".*(?!.*(?!.*[bc])).*[bc]", ".*.*.{500,}", r"(.*)(.*)\1[bc]"]

# Accepted on the longest paths, and among the slowest of those.
SLOWEST = [
    "(?:a{0,63}){2}(?:a{0,63}){2}b",
    "(?:[ab]?){20}[cd]",
    "(?:a|a){20}[bc]",
    ".*(?:(?:a|b)?(?:a|c)?)?.*[de]",
    "(?:a*b)*(?:a*b)*[ef]",
    r".*.*\b",
    "(a)*(a)*[cd]",
    r"\w*?\w*?[!?]",
    "(?i)[ak]*[ak]*[bc]",
    "(?:.*[ab])?(?:.*[ab])?[cd]",
    ".*(?=.*[bc])",
    "(?:a|b)*?(?:a|b)*?[cd]",
    ".*a.*b.*",
    ".*.*.*",
]


def _strict_settings(max_examples: int) -> settings:
    return settings(max_examples=max_examples, deadline=None, derandomize=True)


@pytest.mark.parametrize("key", ORDINARY)
def test_ordinary_keys_are_accepted(key: str) -> None:
    assert Pattern(key).key == key


def _is_for_usual_length_only(pattern: Pattern) -> bool:
    try:
        pattern.matches("abcxd!" + "b" * (USUAL_PATH_LENGTH - 5))
    except PolicyError as error:
        assert "too long for the pattern" in str(error)  # noqa: PT017
        assert error.got["length"] == USUAL_PATH_LENGTH + 1  # noqa: PT017
        return True
    return False


@pytest.mark.parametrize("key", [*CUBIC, *CUBIC_TOO])
def test_three_parts_that_can_stop_anywhere_are_for_paths_of_usual_length(key: str) -> None:
    pattern = Pattern(key)
    usual = "abcxd!" + "b" * (USUAL_PATH_LENGTH - 6)
    assert pattern.matches(usual) == bool(re.fullmatch(key, usual))
    assert _is_for_usual_length_only(pattern)


def test_a_path_that_is_too_long_for_one_pattern_can_be_looked_up_where_that_is_not_tried() -> None:
    index = PatternIndex()
    index.add("few", Pattern(".*/x/.*/y/.*/z/.*"))
    index.add("any", Pattern("a.*"))
    assert index.matching("a/" * 200) == ("any",)
    with pytest.raises(PolicyError, match="too long for the pattern"):
        index.matching("a/" * 200 + "x/y/z/b")


@pytest.mark.parametrize("key", [".*/340/[am].*/.*_proj", "model/.*/block_.*/attn/.*/kernel", ".*/.*/.*/dense"])
def test_three_free_parts_in_ordinary_keys(key: str) -> None:
    path = "model/a/340/block_1/attn/mlp/q_proj"
    assert Pattern(key).matches(path) == bool(re.fullmatch(key, path))


@pytest.mark.parametrize("key", RUNAWAY)
def test_runaway_keys_are_refused_by_name(key: str) -> None:
    with pytest.raises(PatternError, match="backtrack without end") as caught:
        Pattern(key)
    assert caught.value.got == {"key": key}
    assert "no repeat inside a repeat" in caught.value.fix


def test_a_star_at_the_beginning_is_told_to_be_no_shell_pattern() -> None:
    with pytest.raises(PatternError, match=r"Write \.\* for any text: a key is no shell pattern"):
        Pattern("*/query")


def test_the_message_says_what_is_wrong_and_what_to_do() -> None:
    with pytest.raises(PatternError) as caught:
        Pattern("(a+)+x")
    assert str(caught.value) == (
        "Key can backtrack without end: a repeat inside a repeat can read the same text in two ways. "
        "Got key='(a+)+x'. Expected a pattern whose time is bounded. "
        "Use [^/]* for one part of a path instead of .*, and no repeat inside a repeat."
    )


@pytest.mark.parametrize("key", ["(", "[a", "*a", "a**", r"\q", "(?P<1>a)", "a{2,1}", r"(?P=x)", "(?<=a+)b"])
def test_keys_that_are_no_regular_expression_are_refused(key: str) -> None:
    with pytest.raises(PatternError, match="Key is not a regular expression: ") as caught:
        Pattern(key)
    assert repr(key) in str(caught.value)


def test_keys_that_are_too_long_are_refused() -> None:
    Pattern("a" * MAX_KEY_LENGTH)
    with pytest.raises(PatternError, match=f"Key is too long. Got length={MAX_KEY_LENGTH + 1}"):
        Pattern("a" * (MAX_KEY_LENGTH + 1))


def test_deeply_nested_keys_are_refused_and_crash_nothing() -> None:
    with pytest.raises(PatternError):
        Pattern("(" * 500 + "a" + ")" * 500 + "*" * 0 + "(" * 10)


def test_paths_that_are_too_long_are_refused() -> None:
    index = PatternIndex()
    for look in (Pattern(".*").matches, index.matching):
        look("a" * MAX_PATH_LENGTH)
        with pytest.raises(PolicyError, match="Path is too long"):
            look("a" * (MAX_PATH_LENGTH + 1))


def test_a_path_of_two_lines_is_refused_only_where_it_could_take_too_long() -> None:
    assert not Pattern("encoder/.*").matches("encoder/a\nb")
    for key in (".*a.*b.*", ".*.*.*"):
        with pytest.raises(PolicyError, match="line feed"):
            Pattern(key).matches("ab\n")
        assert Pattern(key).matches("xaxbx")


def test_a_pattern_matches_the_whole_path_only() -> None:
    pattern = Pattern("encoder")
    assert [pattern.matches(path) for path in ("encoder", "encoder/dense", "my/encoder", "encoder2")] == [
        True,
        False,
        False,
        False,
    ]


def test_patterns_are_values() -> None:
    assert Pattern("a.*") == Pattern("a.*")
    assert Pattern("a.*") != Pattern("b.*")
    assert len({Pattern("a.*"), Pattern("a.*")}) == 1
    assert repr(Pattern("a.*")) == "Pattern('a.*')"
    assert pickle.loads(pickle.dumps(Pattern("a.*"))).matches("ab")


# The bound


@_strict_settings(500)
@given(st.one_of(EXPRESSIONS, AMBIGUOUS), st.integers(4, 20))
def test_no_accepted_key_tries_more_than_its_bound(key: str, length: int) -> None:
    node = _parsed(key)
    try:
        # Text of one line only, as `Pattern` sees to where it matters. Where every kind of step costs 1 ns, the bound
        # is the number of steps.
        with pytest.MonkeyPatch.context() as patch:
            for price in ("_FAST", "_SLOW", "_LITERAL"):
                patch.setattr(runaway, price, 1.0)
            bound = estimate_seconds(node, length, is_one_line=True) * 1e9
    except RunawayError:
        assume(False)
    # A step of the bound is one way through the expression up to some place. There a repeat looks at the next character
    # to go on and once more to stop; `.*` at the end, whose steps the bound leaves out, looks at each character.
    limit = 2 * (bound + length + 1)
    for text in worst_texts(length):
        matcher = Matcher(text, limit)
        try:
            matcher.fullmatch(node)
        except TooManyError:
            pytest.fail(f"{key!r} on {text!r} tries more than {limit:.0f}")


@_strict_settings(400)
@given(EXPRESSIONS, PATHS)
def test_the_counting_matcher_finds_every_match_of_re(key: str, text: str) -> None:
    # The other way round does not hold: its sets of characters are larger and its look-arounds always succeed.
    node = _parsed(key)
    if _compiled(key).fullmatch(text) and "(?!" not in key and "(?>" not in key and "+" not in key:
        assert Matcher(text, 1e5).fullmatch(node)


@pytest.mark.parametrize("key", ["(a+)+x", "(a|a)*x", "(a|aa)+x", "(?:a.*b)*c", "([a-z]+/?)+[0-9]"])
def test_what_is_refused_as_endless_doubles_with_each_character(key: str) -> None:
    node = parse(key)
    looks = []
    for length in (8, 12, 16):
        matcher = Matcher("ab" * (length // 2) + "!" if "b" in key else "a" * length + "!", 1e7)
        matcher.fullmatch(node)
        looks.append(matcher.num_looks)
    assert looks[1] > 2 * looks[0]
    assert looks[2] > 2 * looks[1]


@pytest.mark.parametrize("key", CUBIC)
def test_what_is_too_slow_on_long_paths_takes_eight_times_as_long_on_twice_the_length(key: str) -> None:
    looks = []
    for length in (32, 64):
        most = 0
        for text in ("a" * length, "a" * (length // 3) + "b" * (length - length // 3)):
            matcher = Matcher(text, 1e7)
            matcher.fullmatch(parse(key))
            most = max(most, matcher.num_looks)
        looks.append(most)
    assert looks[1] > 5 * looks[0]  # eight times, less what grows with the square
    assert looks[1] * (MAX_PATH_LENGTH / 64) ** 3 > 2e7  # some seconds at 50 ns or more a look


def test_ways_that_multiply_before_a_repeat_are_refused() -> None:
    key = "(?:(?:a|a){9}){2}.*[cd]"
    with pytest.raises(PatternError, match="backtrack without end"):
        Pattern(key)
    with pytest.raises(TooManyError):
        Matcher("a" * 19, 2.0**18).fullmatch(parse(key))


@pytest.mark.parametrize("key", [".*.*.*.{1000,}", "(?:a?){1000000000}+b", "(?:a?){1000000000}b"])
def test_a_least_count_is_counted(key: str) -> None:
    with pytest.raises(PatternError, match="backtrack without end"):
        Pattern(key)


@pytest.mark.parametrize("key", [".*.*{}x", "{}(?:a|b)*(?:a|b)*?[cd]"])
def test_capturing_groups_add_to_the_bound(key: str) -> None:
    assert not _is_for_usual_length_only(Pattern(key.format("()" * 2)))
    assert _is_for_usual_length_only(Pattern(key.format("()" * 300)))


def test_characters_that_are_looked_for_one_by_one_add_to_the_bound() -> None:
    for first, is_limited in ((0x100, False), (0x10000, True)):
        pattern = Pattern(f".*.*[{''.join(chr(first + 3 * i) for i in range(800))}]x")
        assert _is_for_usual_length_only(pattern) == is_limited


def _match_all(keys: list[str], texts: list[str]) -> None:
    for key in keys:
        pattern = Pattern(key)
        for text in texts:
            try:
                pattern.matches(text)
            except PolicyError as error:
                assert "line feed" in str(error)  # noqa: PT017


def _match_everything(texts: list[str], usual: list[str]) -> None:
    _match_all([*ORDINARY, *SLOWEST], texts)
    _match_all([*CUBIC, *CUBIC_TOO], usual)


def test_accepted_keys_end_on_the_longest_paths() -> None:
    # In a process of its own: `re` cannot be interrupted. The time allowed is some ten times what is needed.
    texts = [*worst_texts(MAX_PATH_LENGTH), "a" * (MAX_PATH_LENGTH - 1) + "\n", "a " * (MAX_PATH_LENGTH // 2)]
    usual = worst_texts(USUAL_PATH_LENGTH)
    process = multiprocessing.get_context("spawn").Process(target=_match_everything, args=(texts, usual))
    process.start()
    process.join(timeout=300)
    is_running = process.is_alive()
    process.kill()
    assert not is_running
    process.join()
    assert process.exitcode == 0


# The index


@_strict_settings(500)
@given(st.lists(EXPRESSIONS, max_size=8), st.lists(PATHS, min_size=1, max_size=5), st.data())
def test_the_index_finds_what_trying_every_pattern_finds(
    keys: list[str], paths: list[str], data: st.DataObject
) -> None:
    index = PatternIndex()
    present: dict[str, Pattern] = {}
    for key in keys:
        try:
            present[key] = Pattern(key)
        except PatternError:
            continue
        if key in list(present)[:-1]:
            present[key] = present.pop(key)  # added again, it comes last
        index.add(key, present[key])
    if present:
        for key in data.draw(st.lists(st.sampled_from(list(present)), max_size=3)):
            index.discard(key)
            present.pop(key, None)
    assert len(index) == len(present)
    for path in paths:
        assert index.matching(path) == tuple(key for key in present if _compiled(key).fullmatch(path))


_PARTS = st.sampled_from(["layer", "0", "1", "17", "attn", "mlp", "q_proj", "k_proj", "norm", "a", ""])
_RULE_PARTS = st.sampled_from([".*", r"\d+", "layer", "1", "17", "(attn|mlp)", "[qk]_proj", ".*_proj", "norm.?", ""])


@_strict_settings(500)
@given(
    st.lists(st.lists(_RULE_PARTS, min_size=1, max_size=5).map("/".join), max_size=30, unique=True),
    st.lists(st.lists(_PARTS, min_size=1, max_size=6).map("/".join), min_size=1, max_size=10),
)
def test_the_index_is_right_on_rules_as_people_write_them(keys: list[str], paths: list[str]) -> None:
    index = PatternIndex()
    patterns: dict[str, Pattern] = {}
    for key in keys:
        try:
            patterns[key] = Pattern(key)
        except PatternError:
            continue  # five `.*` between slashes are too many
        index.add(key, patterns[key])
    for path in paths:
        assert index.matching(path) == tuple(key for key in patterns if re.fullmatch(key, path))


def test_matches_come_in_the_order_of_insertion() -> None:
    index = PatternIndex()
    keys = [".*", "a/.*", ".*/b", r"\w/b", "a/b"]
    for key in keys:
        index.add(key, Pattern(key))
    assert index.matching("a/b") == tuple(keys)
    index.discard("a/.*")
    index.add("a/.*", Pattern("a/.*"))
    assert index.matching("a/b") == (".*", ".*/b", r"\w/b", "a/b", "a/.*")


def test_discarding_an_absent_key_does_nothing() -> None:
    index = PatternIndex()
    index.discard("a")
    assert len(index) == 0


def test_a_thousand_rules_try_few_patterns_for_one_path() -> None:
    index = PatternIndex()
    for i in range(1000):
        key = rf".*/{i}/(attn|mlp)/.*_proj"
        index.add(key, Pattern(key))
    crowds = [len(filed) for drawer in index._drawers.values() for filed in drawer.values()]
    assert sum(crowds) == 1000
    assert max(crowds) < 10


# Sets of characters

_SETS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), max_size=5)


@_strict_settings(200)
@given(_SETS, _SETS)
def test_sets_of_characters_behave_as_sets(first: list[list[int]], second: list[list[int]]) -> None:
    one, two = union([tuple(r) for r in first]), union([tuple(r) for r in second])
    members = [{c for low, high in ranges for c in range(low, high + 1)} for ranges in (one, two)]
    assert members[0] == {c for low, high in first for c in range(low, high + 1)}
    assert overlap(one, two) == bool(members[0] & members[1])
    assert union(one, complement(one)) == ((0, 0x10FFFF),)
    assert not overlap(one, complement(one))


@pytest.mark.parametrize("text", ["a", "K", "é", "7", "_", "/", "\n", "ſ", "İ", "٣", "Å"])
@pytest.mark.parametrize(
    "key",
    [
        ".",
        r"\w",
        r"\W",
        r"\d",
        r"\D",
        r"\s",
        r"\S",
        "[a-k]",
        "[^a-k]",
        r"[\W7]",
        r"[^\W]",
        r"[^\d_]",
        "(?i:k)",
        "(?i:[^k])",
        "(?i:s)",
        "(?i:i)",
        "(?i:[a-z])",
        "(?s:.)",
        "(?i:é)",
        "(?i:å)",
        r"(?a:\w)",
        r"(?a:[^\w])",
    ],
)
def test_a_set_holds_every_character_that_re_matches(key: str, text: str) -> None:
    if re.fullmatch(key, text):
        assert any(low <= ord(text) <= high for low, high in parse(key).first)


def _parsed(key: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            re.compile(key)
        except re.error:
            assume(False)
    return parse(key)


def _compiled(key: str) -> re.Pattern[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return re.compile(key)
