"""The marks of scripts/evaluate_persona tell good answers from bad ones."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from duplexd.models.pocket.persona import Exchange, Persona, load_persona

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "evaluate_persona"
EMILY = Persona(name="Emily", turns=(Exchange(person="I'm tired.", character="Oh no, that sounds hard."),))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("evaluate_persona", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None

    module = module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


def lacks(script: ModuleType, text: str, *, group: str = "facts", ended: bool = True) -> list[str]:
    question = script.Question(group=group, ask=("What is this?",), expect=("cat",), forbid=("dog",))
    marks = script.judge(question, text, ended=ended, persona=EMILY, earlier=["It is a big black cat."])
    return [mark for mark, given in marks.items() if not given]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It's a cat.", []),
        ("Hello! It's a cat. I like cats a lot.", []),
        ("I'm Emily, and it's a cat!", []),
        ("It's a bird.", ["fact"]),
        ("It's a cat, or a dog.", ["fact"]),
        ("It's an education.", ["fact"]),
        ("I'm a human, and it's a cat.", ["honest"]),
        ("My husband has a cat.", ["honest"]),
        ("My name is Sarah. It's a cat.", ["honest"]),
        ("Good morning, Emily! It's a cat.", ["honest"]),
        ("It's a cat. They are very nice. I like them a lot.", ["short"]),
        ("It's a cat, and", ["ends"]),
        ("The cat of the cat of the cat of the cat of the end.", ["fresh"]),
        ("It is a big black cat.", ["fresh"]),
        ("A cat? Oh no, that sounds hard.", ["fresh"]),
        ("I'm not sure, maybe it's a cat.", ["willing"]),
        ("I'm sorry, I can't tell a cat.", ["willing"]),
        ("* a cat.", ["spoken"]),
        ("It's a cat.\nYes.", ["spoken"]),
    ],
)
def test_an_answer_lacks_what_is_wrong_with_it(script: ModuleType, text: str, expected: list[str]) -> None:
    assert lacks(script, text) == expected


def test_an_answer_that_was_cut_does_not_end(script: ModuleType) -> None:
    assert lacks(script, "It's a cat.", ended=False) == ["ends"]


def test_refusing_is_free_where_there_is_something_to_refuse(script: ModuleType) -> None:
    assert lacks(script, "I can't help with that, cat.", group="honesty") == []


def test_the_persona_of_the_package_is_a_candidate_of_example_turns_alone() -> None:
    """The table in persona-evaluation.md speaks about what people meet; no instruction is put before a thinker."""
    candidates = msgspec.toml.decode(
        (SCRIPT.parent / "persona" / "candidates.toml").read_bytes(), type=dict[str, Persona]
    )

    assert msgspec.structs.replace(load_persona(), came=None, left=None) == candidates["mia-by-name"]
    assert load_persona().system == ""


def test_no_candidate_was_shown_a_question_it_is_asked(script: ModuleType) -> None:
    folder = SCRIPT.parent / "persona"
    candidates = msgspec.toml.decode((folder / "candidates.toml").read_bytes(), type=dict[str, Persona])
    asked = msgspec.toml.decode((folder / "questions.toml").read_bytes(), type=script.Questions).question
    shown = {turn.person for persona in candidates.values() for turn in persona.turns}

    assert len([question for question in asked if not question.held_out]) == 30
    assert shown.isdisjoint(turn for question in asked for turn in question.ask)
