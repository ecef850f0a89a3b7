"""A file holds one idea, and is read in one go."""

from pathlib import Path

TREE = Path(__file__).parents[2]
MOST_LINES = 500


def test_no_file_of_the_product_has_more_than_five_hundred_lines() -> None:
    files = [file for top in ("client", "service") for file in (TREE / top).rglob("*.py")]
    assert len(files) > 100
    assert [str(file) for file in files if len(file.read_text().splitlines()) > MOST_LINES] == []
