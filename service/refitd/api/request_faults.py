"""What is wrong with a request's fields, in sentences: which field, what came, and what is wanted. Pure."""

from collections.abc import Mapping
from typing import Any

from refitd.text import clean, one_line, plain_refusal

_TEXT_SHOWN = 60  # characters of a text that came
_MOST_BITS = 128  # of a number that is shown

# By pydantic's names of faults: what is wanted, with what pydantic knows of it.
_WANTED: Mapping[str, str] = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dataclass_type": "a JSON object",
    "dict_type": "a JSON object",
    "enum": "{expected}",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "list_type": "a JSON array",
    "literal_error": "{expected}",
    "model_attributes_type": "a JSON object",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "string_too_long": "a text of at most {max_length} characters",
    "string_type": "a text",
}
_FORM_OF = {"allow_missing": " of patterns of names, such as 'mtp.*'"}


def fault_sentence(fault: Mapping[str, Any]) -> str:
    """Say what is wrong.

    Args:
        fault: as pydantic has it; the first part of its `loc` is where in the request it is (`query`, `body`).
    """
    place, *path = (str(part) for part in fault["loc"])
    place = "headers" if place == "header" else place
    field = f"{one_line('.'.join(path))} in the {place}" if path else f"the {place}"
    match fault["type"]:
        case "json_invalid":
            return f"the {place} is no JSON: {plain_refusal(fault['ctx']['error'])}, at character {path[0]}"
        case "missing":
            return f"{field} is missing"
        case "unexpected_keyword_argument" | "extra_forbidden":
            return f"{field} is no field of this request"
        case kind if (wanted := _WANTED.get(kind)) is not None:
            form = _FORM_OF.get(path[-1] if path else "", "")
            return f"{field} is {_came(fault['input'])}: it has to be {_filled(wanted, fault.get('ctx', {}))}{form}"
        case _:
            return f"{field} is {_came(fault['input'])}: {plain_refusal(fault['msg'])}"


def _filled(wanted: str, known: Mapping[str, Any]) -> str:
    """A limit such as 300.0 is written as 300."""
    whole = {name: int(each) for name, each in known.items() if isinstance(each, float) and each.is_integer()}
    return wanted.format(**{**known, **whole})


def _came(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return repr(clean(value if len(value) <= _TEXT_SHOWN else value[:_TEXT_SHOWN] + "…"))
        case int() if value.bit_length() > _MOST_BITS:
            return "a number of too many digits"
        case int() | float():
            return str(value)
        case list():
            return "a JSON array"
        case _:
            return "a JSON object"
