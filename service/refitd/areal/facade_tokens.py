"""The tokens that open a facade: from a file, which is read for each request, or from a variable."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from refitd.tokens import Tokens, tokens_from


@dataclass(frozen=True, slots=True, kw_only=True)
class FacadeTokens:
    """Where they come from. With neither, whoever reaches a facade may ask it."""

    file: Path | None = None
    secret: SecretStr | None = None

    @property
    def are_set(self) -> bool:
        """Whether a facade wants one."""
        return self.file is not None or self.secret is not None

    def read(self) -> Tokens:
        """The tokens, which open what only looks as well.

        Raises:
            TokensRefusedError: they are set, and there is none that can be used.
            OSError: the file cannot be read.
        """
        tokens = tokens_from("facade_token", self.secret, self.file)
        return Tokens(write=tokens, read=tokens)
