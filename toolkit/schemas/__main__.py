"""Write every schema anew: `python -m toolkit.schemas`."""

from __future__ import annotations

from toolkit.records.io import write_json
from toolkit.schemas import KINDS, file_of, schema

for kind in KINDS:
    print(write_json(file_of(kind), schema(kind)))
