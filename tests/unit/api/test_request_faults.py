"""What is wrong with a request's fields, in sentences instead of pydantic's words."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from refitd.api.errors import fault_sentence
from refitd_client.contract.states import LogSeverity
from refitd_client.contract.wire import STRICT


def _refuse(value: str) -> str:
    raise ValueError(f"{value} is taken")


@dataclass
class Body:
    __pydantic_config__ = STRICT

    whole: Annotated[int, Field(gt=0, lt=9)] = 1
    number: Annotated[float, Field(ge=0, le=300.0, allow_inf_nan=False)] = 1.0
    switch: bool = False
    text: Annotated[str, Field(max_length=3)] = ""
    texts: list[str] | None = None
    named: dict[str, str] | None = None
    chosen: Literal["a", "b"] = "a"
    severity: LogSeverity = LogSeverity.INFO
    free: Annotated[str, AfterValidator(_refuse)] = ""


def told(value: Any) -> list[str]:
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(Body).validate_python(value)
    return [fault_sentence({**fault, "loc": ("body", *fault["loc"])}) for fault in raised.value.errors()]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("whole", "x", "'x': it is not a whole number"),
        ("whole", None, "null: it is not a whole number"),
        ("whole", 1.5, "1.5: it is not a whole number"),
        ("whole", 0, "0: it has to be more than 0"),
        ("whole", 9, "9: it has to be less than 9"),
        ("number", [1], "a JSON array: it is not a number"),
        ("number", "x", "'x': it is not a number"),
        ("number", float("inf"), "inf: it has to be a finite number"),
        ("number", -1, "-1: it has to be 0 or more"),
        ("number", 301, "301: it has to be 300 or less"),
        ("switch", "perhaps", "'perhaps': it is neither true nor false"),
        ("switch", [], "a JSON array: it is neither true nor false"),
        ("text", True, "true: it has to be a valid string"),
        ("text", "four", "'four': String should have at most 3 characters"),
        ("texts", "x", "'x': it has to be a valid list"),
        ("named", [], "a JSON array: it has to be a JSON object"),
        ("chosen", {"a": 1}, "a JSON object: it has to be 'a' or 'b'"),
        ("severity", "bad", "'bad': it has to be 'info' or 'warning'"),
        ("free", "it", "'it': it is taken"),
    ],
)
def test_a_fault_says_what_came_and_what_is_wanted(field: str, value: Any, said: str) -> None:
    assert told({field: value}) == [f"{field} in the body is {said}"]


def test_of_long_numbers_the_beginning_is_said_at_most() -> None:
    text = f"whole in the body is '{'9' * 60}…': Unable to parse input string as an integer, exceeded maximum size"
    assert told({"whole": "9" * 5000}) == [text]
    assert told({"whole": 10**5000}) == ["whole in the body is a number of too many digits: it has to be less than 9"]


def test_a_field_within_another_is_named_with_its_path() -> None:
    assert told({"named": {"a": 1}, "texts": ["x", None]}) == [
        "texts.1 in the body is null: it has to be a valid string",
        "named.a in the body is 1: it has to be a valid string",
    ]


def test_what_is_no_object_and_a_field_that_is_not_known_are_said_to_be_so() -> None:
    assert told([]) == ["the body is a JSON array: it has to be a JSON object"]
    assert told({"other": 1}) == ["other in the body is no field of this request"]


def test_what_is_not_there_is_missing() -> None:
    faults = [{"type": "missing", "loc": loc, "input": {}} for loc in (("body",), ("body", "step"), ("query", "run"))]
    said = ["the body is missing", "step in the body is missing", "run in the query is missing"]
    assert [fault_sentence(fault) for fault in faults] == said


def test_a_body_that_is_no_json_is_said_to_be_none_with_the_place() -> None:
    fault = {"type": "json_invalid", "loc": ("body", 27), "input": {}, "msg": "JSON decode error"}
    said = "the body is no JSON: Expecting property name enclosed in double quotes, at character 27"
    assert fault_sentence({**fault, "ctx": {"error": "Expecting property name enclosed in double quotes"}}) == said


def test_names_that_a_client_made_up_stand_on_one_line() -> None:
    assert told({"a\nb\x1b": 1}) == ["a b\ufffd in the body is no field of this request"]
