"""Policies: what they may say, how they are read, and what is decided about each part."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_reset import PolicyError, ResumePolicy
from miles_reset.checkpoint import Presence
from miles_reset.policy import PRESETS, Action, Verdict, decide

ABSENT = [Presence.NULL, Presence.KEY_ABSENT, Presence.FILE_ABSENT]


def outcome(action: str | int, presence: Presence, live: bool, chosen: bool) -> str:
    """The whole table, in words of its own."""
    if isinstance(action, int):
        return "set"
    if not live:
        return "refuse" if chosen and action in ("restore", "reset") else "skip"
    if action == "fresh":
        return "fresh"
    if presence == Presence.TORN:
        return "refuse"
    if presence == Presence.PRESENT:
        return "reset" if action == "reset" else "restore"
    return "fresh" if action == "restore-if-present" else "refuse"


@pytest.mark.parametrize("action", [*Action, 7])
@pytest.mark.parametrize("presence", Presence)
def test_each_combination_is_decided(action: str | int, presence: Presence) -> None:
    for live, chosen in itertools.product([True, False], repeat=2):
        verdict = decide(action, presence, live=live, chosen=chosen)
        assert verdict.outcome == outcome(action, presence, live, chosen)
        assert verdict.reason


def test_four_ways_of_not_being_there_are_told_apart() -> None:
    said = {
        decide("restore", presence, live=True, chosen=True).reason for presence in [*ABSENT, Presence.TORN]
    }
    assert len(said) == 4


TOML = """
optimizer = "fresh"
iteration = 12
iteration_unit = "rollout"
[extras]
dataloader = "restore"
[overrides]
lr = 1e-4
betas = [0.9, 0.95]
[reset]
every = 4
unit = "rollout"
"""
YAML = """
optimizer: fresh
iteration: 12
iteration_unit: rollout
extras: {dataloader: restore}
overrides: {lr: 0.0001, betas: [0.9, 0.95]}
reset: {every: 4, unit: rollout}
"""


def write(folder: Path, text: str | bytes, name: str) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    toml = ResumePolicy.from_file(write(tmp_path, TOML, "a.toml"))
    assert toml == ResumePolicy.from_file(write(tmp_path, YAML, "a.yaml"))
    assert toml == ResumePolicy.from_file(str(write(tmp_path, YAML, "a.yml")))
    assert toml.action("optimizer") == "fresh"
    assert toml.action("dataloader") == "restore"
    assert toml.action("another") == "restore-if-present"
    assert toml.chosen_by("optimizer") == toml.chosen_by("dataloader") == "policy"
    assert toml.chosen_by("scheduler") == "default"


def test_numbers_of_yaml_without_a_point_are_numbers(tmp_path: Path) -> None:
    policy = ResumePolicy.from_file(
        write(tmp_path, "overrides: {lr: 1e-4, eps: 1E-8, weight_decay: 2}\n", "a.yaml")
    )
    assert policy.overrides == {"lr": 1e-4, "eps": 1e-8, "weight_decay": 2}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"optimiser": "fresh"}, r"key 'optimiser' that no policy has; the nearest is 'optimizer'"),
    ({"reset": {"evry": 2}}, r"key 'reset.evry' that no policy has; the nearest is 'every'"),
    ({"optimizer": "frsh"}, r"optimizer is 'frsh'; it must be one of .*; the nearest is 'fresh'"),
    ({"scheduler": "reset"}, r"scheduler is 'reset'; it must be one of 'restore'"),
    ({"iteration": -1}, r"iteration is -1"),
    ({"iteration": True}, r"iteration is True"),
    ({"optimizer": None}, r"optimizer is None"),
    ({"version": 2}, r"version 2 is not known; this library reads version 1"),
    ({"allow": ["os.system; rm"]}, r"allow\.0 is 'os.system; rm'"),
    ({"overrides": {"lr": {"a": 1}}}, r"overrides\.lr"),
    ({"extras": "all"}, r"extras is 'all'"),
    ({"reset": {"scheduler": "fresh"}}, r"has 'scheduler' under \[reset\]; it belongs to the top"),
    ({"scheduler": False}, r"scheduler is False; it must be one of .*; YAML takes on, off, yes and no for"),
    ({"iteration": "100"}, r"iteration is '100'; it must be .*; a number stands without quotes"),
]


@pytest.mark.parametrize(("data", "said"), WRONG, ids=[str(next(iter(data.items()))) for data, _ in WRONG])
def test_what_no_policy_may_say_is_one_clear_error(data: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said) as caught:
        ResumePolicy.from_dict(data)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("Nothing was changed.")


def test_all_mistakes_are_said_at_once() -> None:
    with pytest.raises(PolicyError) as caught:
        ResumePolicy.from_dict(
            {"optimiser": "fresh", "scheduler": "off", "reset": {"evry": 2}, "rng": "fresh"}
        )
    said = str(caught.value)
    assert [said.count(word) for word in ("'optimiser'", "scheduler is 'off'", "'reset.evry'")] == [1, 1, 1]
    assert [said.count(f"({number})") for number in (1, 3, 4)] == [1, 1, 0]
    assert said.count("Nothing was changed.") == 1


BROKEN: list[tuple[str, str | bytes, str]] = [
    ("bare.toml", "optimizer = fresh\n", "TOML has text in quotes"),
    ("big.toml", b"#" * 10_000_000, "has more than 16,384 bytes"),
    ("big.yaml", b"#" * 10_000_000, "has more than 16,384 bytes"),
    ("aliases.yaml", "a: &a [1]\nb: *a\n", "has YAML anchors or aliases"),
    (
        "bomb.yaml",
        "a: &a [x,x]\n" + "".join(f"b{i}: &b{i} [*a,*a]\n" for i in range(30)),
        "anchors or aliases",
    ),
    ("deep.yaml", "[" * 10_000, "is nested more than 20 deep"),
    ("dots.toml", "a" + ".a" * 20_000 + " = 1", "has more than 16,384 bytes"),
    ("deep.toml", "a = " + "[" * 10_000, "is not readable as TOML"),
    ("twice.yaml", "optimizer: fresh\noptimizer: restore\n", "optimizer is there twice"),
    ("twice.toml", 'optimizer = "fresh"\noptimizer = "reset"\n', "is not readable as TOML"),
    ("object.yaml", "optimizer: !!python/object/apply:os.getcwd []\n", "is not readable as YAML"),
    ("bytes.toml", b"\xff\xfe\x00", "is not readable as TOML"),
    ("tags.yaml", "a: !!int ''", "is not readable as YAML"),
    ("map.yaml", "a: !!map [a]", "is not readable as YAML"),
    ("list.yaml", "- optimizer\n", "is no table of parts but a list"),
    ("empty.yaml", "", "is no table of parts but a NoneType"),
    ("policy.json", "{}", "is neither .toml nor .yaml nor .yml"),
]


@pytest.mark.parametrize(("name", "text", "said"), BROKEN, ids=[name for name, _, _ in BROKEN])
def test_a_file_that_is_no_policy_is_one_clear_error(
    tmp_path: Path, name: str, text: str | bytes, said: str
) -> None:
    with pytest.raises(PolicyError, match=said):
        ResumePolicy.from_file(write(tmp_path, text, name))


def test_a_path_that_is_no_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="cannot be read"):
        ResumePolicy.from_file(tmp_path / "none.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(PolicyError, match="cannot be read"):
        ResumePolicy.from_file(tmp_path / "folder.toml")
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    with pytest.raises(PolicyError, match="cannot be read"):
        ResumePolicy.from_file(tmp_path / "loop.toml")


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
DATA = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@settings(max_examples=100, deadline=None)
@given(DATA)
def test_whatever_is_given_it_is_a_policy_or_a_policy_error(data: Any) -> None:
    for given_data in (data, {"optimizer": data}, {"overrides": data}, {"reset": data}):
        try:
            policy = ResumePolicy.from_dict(given_data)
        except PolicyError as error:
            assert str(error)  # noqa: PT017
        else:
            assert ResumePolicy.from_dict(policy.model_dump(exclude_unset=True)) == policy


def test_an_explicit_choice_beats_an_inferred_one() -> None:
    policy = ResumePolicy.from_dict({"optimizer": "restore"})
    inferred = policy.infer({"optimizer": "fresh", "rng": "fresh"}, "there is no tracker")
    assert inferred.optimizer == "restore"
    assert inferred.rng == "fresh"
    assert inferred.chosen_by("optimizer") == "policy"
    assert inferred.chosen_by("rng") == "there is no tracker"
    assert inferred.chosen_by("scheduler") == "default"
    assert policy.rng == "restore-if-present"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_policies(name: str) -> None:
    policy = ResumePolicy.preset(name)
    assert policy.model_dump(exclude_unset=True) == PRESETS[name][1]


def test_an_unknown_preset_has_a_nearest() -> None:
    with pytest.raises(PolicyError, match="the nearest is 'finetune'"):
        ResumePolicy.preset("fine-tune")


def test_a_schedule_says_when() -> None:
    due = ResumePolicy.from_dict({"reset": {"every": 3, "at": [0, 5]}}).reset.due
    assert [count for count in range(10) if due(count)] == [0, 3, 5, 6, 9]
    assert not any(map(ResumePolicy().reset.due, range(10)))


def test_a_policy_has_a_json_schema_and_a_digest() -> None:
    schema = ResumePolicy.model_json_schema()
    assert schema["additionalProperties"] is False
    assert json.loads(json.dumps(schema)) == schema
    assert ResumePolicy().digest() == ResumePolicy(optimizer="restore").digest()
    assert ResumePolicy().digest() != ResumePolicy(optimizer="fresh").digest()


def test_a_verdict_is_data() -> None:
    assert decide("fresh", Presence.TORN, live=True, chosen=True) == Verdict(
        "fresh", "what was saved is not read"
    )
