"""KeyLimits: what each API key may have: its share of the engine, its bounds, its cache salt, and whether it is an admin's.

It is made of the file of --limits (limits_file.py), or empty. A key is known here by its digest, `Request.owner`; without keys
all requests are one tenant's, whose owner is "". Routes ask for the Tenant that goes to the engine (api/terms.py), the store
for bounds of files. The struct travels to frontend processes as JSON.
"""

from typing import Any

import msgspec

from quire.frontend.http.store.bounds import KeyBounds
from quire.ipc.messages.frontend import Tenant

REST = "*"
NOBODY = ""  # the owner of all requests where no key is needed


class KeyLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one key, or of all keys of one name together. None: no limit.

    cache_salt: keys of equal salts share cached prefixes; None: the key shares them with no other.
    """

    name: str | None = None
    weight: float = 1.0
    max_running: int | None = None
    max_waiting: int | None = None
    tokens_per_minute: int = 0  # 0: no limit
    best_priority: int | None = None  # the lowest number that a request may bring
    cache_salt: str | None = None
    admin: bool = False
    max_files: int | None = None
    max_files_mib: int | None = None
    models: tuple[str, ...] | None = None  # names, or prefixes that end in *


class KeyAccess(msgspec.Struct, frozen=True):
    """One key, resolved. salt: of its cached prefixes; None: all keys share them, as there is no file of limits."""

    tenant: Tenant | None
    salt: str | None = None
    admin: bool = False
    best_priority: int | None = None


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """by_digest: limits of single keys, by the hex SHA-256 of the key. by_name: limits that keys of one name share. rest: those
    of each other key. has_file: whether there is a file of limits."""

    by_digest: dict[str, KeyLimit] = {}
    by_name: dict[str, KeyLimit] = {}
    rest: KeyLimit = KeyLimit()
    has_file: bool = False

    def limit(self, owner: str) -> KeyLimit:
        own = self.by_digest.get(owner)
        if own is None:
            return self.rest
        return self.by_name.get(own.name, own) if own.name is not None else own

    def access(self, owner: str) -> KeyAccess:
        """owner: the digest of a request's key."""
        limit, own = self.limit(owner), self.by_digest.get(owner)
        name = own.name if own is not None else None
        if not self.has_file:
            return KeyAccess(Tenant(owner, _label(owner)) if owner else None)
        tenant = Tenant(
            name=f"name {name}" if name is not None else f"key {owner}",
            label=name or _label(owner),
            weight=limit.weight,
            max_running=limit.max_running,
            max_waiting=limit.max_waiting,
            tokens_per_minute=float(limit.tokens_per_minute),
            best_priority=limit.best_priority,
        )
        salt = f"key {owner}" if limit.cache_salt is None else f"shared {limit.cache_salt}"
        return KeyAccess(tenant, salt, limit.admin, limit.best_priority)

    def may_use(self, owner: str, model: str) -> bool:
        """Whether a key may name this model."""
        models = self.limit(owner).models
        return models is None or any(_matches(model, name) for name in models)

    @property
    def have_admin(self) -> bool:
        """Whether some key is an admin's."""
        return self.rest.admin or any(self.limit(digest).admin for digest in self.by_digest)

    def files(self, owner: str) -> KeyBounds | None:
        """Bounds of what a key stores; None where there are no keys."""
        limit = self.limit(owner)
        if owner == NOBODY and limit.max_files is None and limit.max_files_mib is None:
            return None
        default = KeyBounds()
        mib = limit.max_files_mib
        return KeyBounds(
            default.max_records if limit.max_files is None else limit.max_files,
            default.max_bytes if mib is None else mib << 20,
        )


class CurrentLimits:
    """The limits that hold now: a reload replaces them."""

    def __init__(self, limits: KeyLimits) -> None:
        self._limits = limits

    def use(self, limits: KeyLimits) -> None:
        self._limits = limits

    def access(self, owner: str) -> KeyAccess:
        return self._limits.access(owner)

    def files(self, owner: str) -> KeyBounds | None:
        return self._limits.files(owner)

    def may_use(self, owner: str, model: str) -> bool:
        return self._limits.may_use(owner, model)


def _matches(model: str, name: str) -> bool:
    return model == name or (name.endswith("*") and model.startswith(name[:-1]))


def _label(owner: str) -> str:
    """A tenant's name in metrics, which is no key."""
    return f"key-{owner[:8]}" if owner else "all"


FIELDS: dict[str, Any] = {field.name: field for field in msgspec.structs.fields(KeyLimit)}
