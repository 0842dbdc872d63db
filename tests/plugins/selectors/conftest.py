"""The profiles of the selection tests, for the selectors' own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_path = Path(__file__).parents[2] / "selection" / "conftest.py"
_spec = importlib.util.spec_from_file_location("selection_profiles", _path)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

profile_of, tiny, qwen_7b, phi_1_5 = _module.profile_of, _module.tiny, _module.qwen_7b, _module.phi_1_5
