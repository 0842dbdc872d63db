"""A folder of starts while it is made: what it depends on, what is there already, and the report that closes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, RunError
from toolkit.interfaces import FALLBACK, Start
from toolkit.records.io import digest, read_json, write_json
from toolkit.records.plan import LayerPlan, Plan
from toolkit.records.start import LayerStart, StartFile
from toolkit.runs import starts


class Folder:
    """DIR of `toolkit.runs.starts`; layers that lie there under the same settings are not made again.

    Args:
        path: an empty folder, one that does not exist, or one of the same settings.
        settings: what the starts depend on, plain data.
        layers: name → decision, where each layer's start depends on the settings and its own decision alone, and not on
            the rest of the plan.
        beside: a folder of folders of starts; what they hold of such a layer, made under the same settings and the same
            decision, is taken over, linked where the disk can: plans of random draws share most of their layers.

    Raises:
        InputError: the folder holds starts of other settings (what differs is named), or other things.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Mapping[str, Any],
        layers: Mapping[str, LayerPlan] | None = None,
        beside: Path | None = None,
    ) -> None:
        self.path, self.settings = Path(path), dict(settings)
        self._layers = layers
        self._others = [] if beside is None else sorted(p for p in beside.glob("*") if p != self.path)
        self.records: dict[str, LayerStart] = {}
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file; starts are written to a folder")
        if (self.path / starts.SETTINGS).is_file():
            self._expect(read_json(self.path / starts.SETTINGS))
        elif self.path.is_dir() and (held := sorted(p.name for p in self.path.iterdir() if not p.name.startswith("."))):
            raise InputError(
                f"{self.path} holds {', '.join(held[:5])} and no {starts.SETTINGS}: these are no starts that could be "
                "gone on with; name another folder"
            )
        self.finished = starts.whole(self.path)

    def _expect(self, found: Any) -> None:
        found = found if isinstance(found, dict) else {}
        for key in (*self.settings, *found):
            if found.get(key) != self.settings.get(key):
                raise InputError(
                    f"{self.path} holds starts of other settings: {key} is {_shown(found.get(key))} there and "
                    f"{_shown(self.settings.get(key))} here; name another folder, or remove that one"
                )

    def open(self, plan: Plan) -> None:
        """Write what is asked for: the settings and the plan."""
        if not (self.path / starts.SETTINGS).is_file():
            write_json(self.path / starts.SETTINGS, self.settings)
        if not (self.path / starts.PLAN).is_file():
            write_json(self.path / starts.PLAN, plan.to_json())

    def holds(self, name: str) -> bool:
        """Whether the layer's start lies here, made under these settings; its record is then in `records`."""
        if name in self.records:
            return True
        made_under = self._of(name)
        for folder in (self.path, *self._others):
            if (record := starts.told(folder, name, made_under)) is not None:
                if folder != self.path:
                    starts.take(folder, self.path, name)
                self.records[name] = record
                return True
        return False

    def put(self, name: str, start: Start, record: LayerStart) -> None:
        """Write one layer's start."""
        starts.write(self.path, name, start, record, self._of(name))
        self.records[name] = record

    def _of(self, name: str) -> str:
        """Digest of what one layer's start depends on."""
        if self._layers is None:
            return digest(self.settings)
        own = {key: value for key, value in self.settings.items() if key != "plan"}
        return digest(own | {"layer": self._layers[name].model_dump(mode="json")})

    def report(self) -> StartFile:
        """What closed the folder."""
        return StartFile.load(self.path / starts.REPORT)

    def close(self, names: list[str], calibrated: list[str], fallbacks: float, **about: Any) -> StartFile:
        """Write the report, last of all; where one lies there whose tensors were missing, they must be its own again.

        Args:
            names: the layers, in model order.
            calibrated: those whose initializers asked for calibration.
            fallbacks: the largest share of these that may have been started otherwise.
            about: the report's other fields.

        Raises:
            RunError: more than that; reasons and layers are named, and no report is written, so that nothing takes the
                folder for what was asked for. Or a base is another than the report tells of, which runs were made with.
        """
        fell = starts.fallbacks({name: self.records[name] for name in calibrated}, [FALLBACK])
        count = sum(map(len, fell.values()))
        if count > fallbacks * len(calibrated):
            reasons = "; ".join(f"{reason}: {len(each)}, such as {each[0]}" for reason, each in fell.items())
            raise RunError(
                f"{count} of {len(calibrated)} calibrated layers were not started as asked for, and a share of "
                f"{fallbacks:g} is allowed ({reasons}). The starts are kept in {self.path} without a report; calibrate "
                f"on more text, or allow a larger share of fallbacks"
            )
        bases = {name: base for name in names if (base := self.records[name].base) is not None}
        file = StartFile(layers={name: self.records[name] for name in names}, base=starts.digest_over(bases), **about)
        if (self.path / starts.REPORT).is_file() and (told := self.report().base) != file.base:
            raise RunError(
                f"{self.path / starts.REPORT} tells of the base {told[:12]}, and its layers, made again, are "
                f"{file.base[:12]} (another machine, or other versions): what was trained on that one does not compare "
                "with this one; fetch the layers' files, or start anew without this folder"
            )
        file.save(self.path / starts.REPORT)
        return file


def _shown(value: Any) -> str:
    text = str(value)
    return text[:12] if len(text) > 32 and " " not in text else text
