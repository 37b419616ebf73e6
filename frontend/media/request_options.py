"""mm_processor_kwargs of a request: settings of the model's image processor, for its own images, checked here once.

Only settings that say how large an image may become are taken, by family (Family.options): others, as the size of a patch,
belong to the weights of the encoder. Each item's digest holds them. A server takes them with --trust-request-mm-kwargs alone,
since an image may become as many tokens as the encoder's cache has room for.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.frontend.media.errors import MediaError
from quire.frontend.media.families import Family
from quire.ipc.media import MAX_IMAGE_PIXELS

if TYPE_CHECKING:
    from quire.frontend.media.items import Media

FIELD = "mm_processor_kwargs"
_EDGES = ("shortest_edge", "longest_edge")
MAX_PATCHES = 256  # the processor tries all ways to lay them out


def checked(given: Any, family: Family) -> dict[str, Any]:
    """The settings, which may be none. Raises MediaError."""
    if not given:
        return {}
    if not isinstance(given, Mapping):
        raise MediaError('an object of settings is needed, like {"max_pixels": 401408}', FIELD)
    for name, value in given.items():
        if name not in family.options:
            others = f", but {', '.join(family.options)}" if family.options else ""
            raise MediaError(f"this model's images have no setting {str(name)[:64]!r}{others}", FIELD)
        if name != "size":
            _check_number(name, value)
        elif not isinstance(value, Mapping) or not value:
            raise MediaError(f"size must be an object with {' or '.join(_EDGES)}", FIELD)
        else:
            for edge, pixels in value.items():
                if edge not in _EDGES:
                    raise MediaError(f"size has no {str(edge)[:64]!r}, but {' and '.join(_EDGES)}", FIELD)
                _check_number(f"size.{edge}", pixels)
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in given.items()}


def _check_number(name: str, value: Any) -> None:
    most = MAX_PATCHES if name.endswith("_patches") else MAX_IMAGE_PIXELS
    if type(value) is not int or not 0 < value <= most:
        raise MediaError(f"{name} must be a whole number from 1 to {most}", FIELD)


def trusted(given: Any, media: "Media | None", trusts: bool) -> dict[str, Any]:
    """The same for a client's request: a server may trust none. media: None if the model takes none. Raises MediaError."""
    if not trusts:
        raise MediaError("this server takes none from requests (see --trust-request-mm-kwargs)", FIELD, "unsupported_value")
    return {} if media is None else checked(given, media.family)
