"""Every selection and every draw of a declared study, made again from the profile and the seed; no model is needed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from toolkit import spec
from toolkit.errors import InputError
from toolkit.records.profile import Profile
from toolkit.records.study import Study
from toolkit.registry import registry
from toolkit.selection.studies import Selections


class Regeneration(Selections):
    """The selections of a certificate's study.

    Args:
        plugins: selector name → the distribution that it came from, for the message where it is not installed.

    Raises:
        InputError: at once, where a selector of the study is not installed.
    """

    def __init__(self, study: Study, profile: Profile, plugins: Mapping[str, str] | None = None) -> None:
        super().__init__(study, profile)
        self.budgets = {str(budget): budget for budget in study.budgets}
        installed = registry.of_kind("selector")
        for item in [*study.arms, *study.controls]:
            name, _ = spec.parse(item.selector)
            if name not in installed:
                source = (plugins or {}).get(name)
                hint = f"it came from {source}" if source else "no package is recorded for it"
                failed = "; ".join(f"{k}: {v}" for k, v in registry.failures.items())
                raise InputError(
                    f"{item.label!r} is made by selector {name!r}, which is not installed here ({hint}); without it, "
                    "its selections cannot be made again" + (f" (plug-ins that failed: {failed})" if failed else "")
                )


def plugins(study: Study) -> dict[str, str]:
    """Selector name → distribution and version that it comes from, of every selector of a study."""
    found = {}
    installed = registry.of_kind("selector")
    for item in [*study.arms, *study.controls]:
        name, _ = spec.parse(item.selector)
        if name in installed:
            source = installed[name][1]
            try:
                found[name] = f"{source} {importlib.metadata.version(source)}"
            except importlib.metadata.PackageNotFoundError:  # registered by hand, in a notebook
                found[name] = source
    return dict(sorted(found.items()))
