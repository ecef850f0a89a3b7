"""On a machine with a GPU these tests run without the project's configuration: its support is found from here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
