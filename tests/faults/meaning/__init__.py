"""Changes of meaning: valid configurations, chat templates and conversations, with transformers as the judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ENDED = {"equal": "served", "only ours": "not judged"}


@dataclass(frozen=True)
class Attempt:
    """A case and what became of it.

    Attributes:
        kind: configurations, templates or conversations.
        number: of the case.
        ended: served as transformers does, refused, different, traceback, or not judged where transformers fails.
        said: the sentence, or what is wrong.
        given: what was changed.
    """

    kind: str
    number: int
    ended: str
    said: str
    given: Any

    @property
    def is_defect(self) -> bool:
        """Whether it is neither served right nor refused."""
        return self.ended in ("different", "traceback")

    def kept(self) -> dict[str, Any]:
        """The case as it is written."""
        return {"kind": self.kind, "case": self.number, "ended": self.ended, "said": self.said, "given": self.given}


def attempt(cases: int, seed: int) -> list[Attempt]:
    """Attempt so many cases, four tenths of them configurations and the others halves of templates and conversations.

    Args:
        cases: of all kinds.
        seed: of what is changed.
    """
    from benchmarks.folder_judge import judge as judge_configs
    from tests.faults.meaning.chats import as_kept, changed_case, judge
    from tests.faults.meaning.configs import changed_configs

    configs = dict(changed_configs(cases * 4 // 10, seed))
    found = []
    for number, (name, verdict) in enumerate(judge_configs(configs).items()):
        said = verdict.said or f"relative error {verdict.error}"
        ended = _ENDED.get(verdict.kind, verdict.kind)
        found.append(Attempt("configurations", number, ended, said, {name: configs[name]}))
    for kind in ("templates", "conversations"):
        for number in range(cases * 3 // 10):
            case = changed_case(number, seed, kind)
            found.append(Attempt(kind, number, *judge(case), as_kept(case)))
    return found
