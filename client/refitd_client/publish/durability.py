"""Which versions get files where engines take them from the trainer's memory: all, one of some, or none.

A version without files lasts as long as the engines that hold it. One that restarts goes back to the newest version
with files, and so does a rollback.

    always     files follow each version
    every=N    files follow the first version of a publisher, and then one of N
    never      files are written only where not every engine has taken the version from memory

A version that engines do not all take always gets files, whatever the policy is: nothing else could bring it to them.
"""

import re
from dataclasses import dataclass

from refitd_client.contract.naming import DURABLE_KEY

ALWAYS = "always"
NEVER = "never"
_EVERY = re.compile(r"every=([1-9]\d{0,8})")


@dataclass(frozen=True, slots=True)
class DurabilityPolicy:
    """One version of `every` gets files; none where it is None. `text` is how the trainer said it."""

    text: str
    every: int | None

    @classmethod
    def of(cls, text: str) -> "DurabilityPolicy":
        """Read what the trainer says.

        Raises:
            ValueError: it is none of `always`, `never` and `every=N`.
        """
        if text in {ALWAYS, NEVER}:
            return cls(text, 1 if text == ALWAYS else None)
        if (match := _EVERY.fullmatch(text)) is None:
            raise ValueError(f"durable is {text!r}: it is 'always', 'never', or 'every=10' for one version of ten")
        return cls(text, int(match[1]))

    @property
    def is_always(self) -> bool:
        """Whether each version gets files."""
        return self.every == 1

    def of_next(self, since: int | None) -> str | None:
        """The policy in words if the next version needs no files where engines take it; None if it gets some.

        Args:
            since: how many versions this publisher has published since the last with files; None before the first.
        """
        gets_files = self.every is not None and (since is None or since + 1 >= self.every)
        return None if gets_files else self.text


ALL = DurabilityPolicy(ALWAYS, 1)


def with_policy(metadata: dict[str, str], policy: str | None) -> dict[str, str]:
    """An offer's metadata. The service reads the policy there, so what a trainer says under that key is left out."""
    said = {key: text for key, text in metadata.items() if key != DURABLE_KEY}
    return said if policy is None else said | {DURABLE_KEY: policy}
