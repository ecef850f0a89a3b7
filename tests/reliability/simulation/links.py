"""Links between hosts: how requests and answers get through, or do not."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TypeVar

from refitd.problem import ProblemError
from refitd.state.journal.journal import JournalError
from refitd_client.contract.wire import Problem
from refitd_client.errors import ServiceProblemError, ServiceUnreachableError

from .life import Life
from .place import Place

AnswerT = TypeVar("AnswerT")
STALL_SECONDS = 10.0  # as `HttpByteSource` gives up
ANSWER_SECONDS = 10.0


class Damage(StrEnum):
    """What happens to the next part of a file, or to the next answer."""

    CUT = "the connection is cut in the middle"
    STALL = "nothing comes any more, in the middle"
    WRONG = "a bit is another one"
    REORDERED = "the halves have changed places"
    SLOW = "it takes seconds"
    LOST = "the answer is lost, after what was asked has been done"


class Link:
    """From a host to another. `cut`: nothing gets through. `slow`: seconds that each answer takes longer.

    `parts` is what happens to the next manifests and parts of files that go over it, `answers` to the next other
    answers.
    """

    def __init__(self, to: Place, chance: random.Random, counts: Counter[str]) -> None:
        self.to = to
        self.cut = False
        self.slow = 0.0
        self.parts: deque[Damage] = deque()
        self.answers: deque[Damage] = deque()
        self.counts = counts
        self._chance = chance

    def mend(self) -> None:
        self.cut, self.slow = False, 0.0
        self.parts.clear()
        self.answers.clear()

    def next_of(self, damages: deque[Damage]) -> Damage | None:
        if not damages:
            return None
        self.counts[damages[0].name.lower()] += 1
        return damages.popleft()

    def chance(self) -> float:
        return self._chance.random()

    def somewhere_in(self, data: bytes) -> int:
        return self._chance.randrange(max(1, len(data)))

    async def take_time(self) -> None:
        await asyncio.sleep(self._chance.random() * 0.004 + self.slow / 2)

    async def ask(self, act: Callable[[Life], Awaitable[AnswerT]], damage: Damage | None = None) -> AnswerT:
        """Have the process at the other end answer. Of damages an answer may be lost, or come late.

        Raises:
            ServiceError: as the client's.
        """
        life = await self.reach()
        if damage is Damage.SLOW:
            await asyncio.sleep(self._chance.random() * 15.0)
            self.still(life)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await act(life)
        except TimeoutError:
            raise ServiceUnreachableError(f"{self.to.name} did not answer in time") from None
        except JournalError as error:
            problem = Problem(type="disk-full", title="The journal cannot be written", status=507, detail=str(error))
            raise ServiceProblemError(problem) from error
        except ProblemError as error:
            self.still(life)
            raise ServiceProblemError(error.document()) from error
        await self.take_time()
        self.still(life)
        if damage in {Damage.LOST, Damage.CUT, Damage.STALL}:
            raise ServiceUnreachableError(f"the answer of {self.to.name} was lost")
        return answer

    async def reach(self) -> Life:
        await self.take_time()
        if self.cut:
            await asyncio.sleep(self._chance.choice([0.0, 5.0]))
            raise ServiceUnreachableError(f"{self.to.name} cannot be reached")
        if self.to.life is None:
            raise ServiceUnreachableError(f"{self.to.name} refuses connections")
        return self.to.life

    def still(self, life: Life) -> None:
        if self.cut or self.to.life is not life:
            raise ServiceUnreachableError(f"the connection to {self.to.name} broke")
