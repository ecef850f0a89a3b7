"""These tests need a real SGLang: without REFITD_SGLANG_VENV there are none."""

from support.servers import SGLANG_VENV

collect_ignore_glob = [] if SGLANG_VENV else ["test_*.py"]
