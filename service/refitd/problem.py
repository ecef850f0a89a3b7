"""The problems that the API answers with (RFC 9457). One table: a slug names a kind of problem for ever."""

from collections.abc import Mapping
from enum import Enum

from refitd_client.contract.wire import Problem


class Slug(Enum):
    """Each kind of problem: its slug, its HTTP status, its title."""

    BAD_REQUEST = ("bad-request", 422, "The request does not have the right form")
    BAD_PATH = ("bad-path", 400, "The path is not written plainly")
    BAD_NAME = ("bad-name", 422, "The run or step cannot be used")
    UNSUPPORTED_KIND = ("unsupported-kind", 422, "This kind of version cannot be carried out")
    PATH_OUTSIDE_ROOT = ("path-outside-root", 422, "The path is not in the root")
    PATH_MISSING = ("path-missing", 422, "There is no directory at the path")
    PATH_UNREADABLE = ("path-unreadable", 422, "The directory cannot be read")
    VERSION_CONFLICT = ("version-conflict", 409, "The step has been published with other content")
    VERSION_NOT_GOOD = ("version-not-good", 409, "The version cannot be served")
    FILES_NOT_HELD = ("files-not-held", 410, "The service does not hand out these files")
    BAD_RANGE = ("bad-range", 416, "The file has no such part")
    OTHER_ROOT = ("other-root", 409, "The service watches another root")
    RUN_NOT_FOLLOWED = ("run-not-followed", 409, "No engine follows the run")
    RUN_FOLLOWED = ("run-followed", 409, "The service takes its versions from an upstream")
    HOST_NAME_TAKEN = ("host-name-taken", 409, "Another host or engine has that name")
    RUN_OPEN = ("run-open", 409, "The engine follows a run that has not ended")
    RUN_NEEDED = ("run-needed", 409, "The run is still needed")
    NOTHING_TO_ROLL_BACK = ("nothing-to-roll-back", 409, "There is no earlier good version")
    UNKNOWN_VERSION = ("unknown-version", 404, "No such version")
    UNKNOWN_ENGINE = ("unknown-engine", 404, "No such engine")
    UNKNOWN_RUN = ("unknown-run", 404, "No such run")
    UNKNOWN_ID = ("unknown-id", 404, "No such version or engine")
    NOT_FOUND = ("not-found", 404, "There is nothing at this address")
    ENGINE_EXISTS = ("engine-exists", 409, "The engine is known already")
    ENGINE_NOT_REMOVABLE = ("engine-not-removable", 409, "The engine is named in the settings")
    BAD_ENGINE_URL = ("bad-engine-url", 422, "The engine's URL cannot be used")
    ENGINE_NOT_ALLOWED = ("engine-not-allowed", 403, "The engine's address is not on the allow list")
    UNAUTHORIZED = ("unauthorized", 401, "A bearer token is needed")
    FORBIDDEN = ("insufficient-scope", 403, "The bearer token does not open this")
    NO_CERTIFICATE = ("no-certificate", 403, "A client's certificate is needed")
    FOREIGN_PAGE = ("foreign-page", 403, "Another site's page asks for this")
    FOREIGN_HOST = ("foreign-host", 403, "The service does not go by this name")
    TOO_SLOW = ("too-slow", 408, "The request took too long to arrive")
    TOO_LARGE = ("too-large", 413, "The request is too large")
    HEAD_TOO_LARGE = ("head-too-large", 431, "The request's head is too large")
    TOO_MANY = ("too-many", 503, "The service has as many of these as it takes")
    METHOD_NOT_ALLOWED = ("method-not-allowed", 405, "The method is not allowed here")
    NOT_READY = ("not-ready", 503, "The service is not ready")
    NOT_LEADING = ("not-leading", 503, "Another service of the group leads")
    DISK_FULL = ("disk-full", 507, "The journal cannot be written")
    INTERNAL = ("internal", 500, "The service has a bug")

    def __init__(self, slug: str, status: int, title: str) -> None:
        self.slug = slug
        self.status = status
        self.title = title


class ProblemError(Exception):
    """Raised where a request cannot be carried out; the API turns it into a problem document."""

    def __init__(self, kind: Slug, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.headers = dict(headers or {})

    def document(self, instance: str | None = None) -> Problem:
        kind = self.kind
        return Problem(
            type=f"urn:refitd:problem:{kind.slug}",
            title=kind.title,
            status=kind.status,
            detail=self.detail,
            instance=instance,
        )
