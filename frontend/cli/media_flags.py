"""Flags of `quire serve` and `quire route` about the images that requests bring. Names are vLLM's where it has the flag.

`add_media_flags` adds them to a group of the command; `media_options` checks them and makes MediaOptions of them.
"""

import argparse
import json
import os
import re
from typing import TYPE_CHECKING, Any

from quire.ipc.process.command import CommandParser
from quire.ipc.process.flags import JsonObject, Switch

if TYPE_CHECKING:
    from quire.frontend.media.options import MediaOptions

_MOST_BODY_MIB = 1024
_KINDS = ("image", "video", "audio")


class _LimitsObject(JsonObject):
    """A JSON object, or vLLM's older form: image=1,video=0."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        if re.fullmatch(r"\w+=\d+(,\w+=\d+)*", values):
            values = json.dumps({kind: int(number) for kind, number in (pair.split("=") for pair in values.split(","))})
        super().__call__(parser, namespace, values, option_string)


def add_media_flags(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--limit-mm-per-prompt",
        action=_LimitsObject,
        default={},
        metavar="JSON",
        help='most images of a prompt, like {"image": 8}; {"image": 0} serves the text model alone (default: 64)',
    )
    add(
        "--allowed-media-domains",
        nargs="+",
        action="extend",
        default=[],
        metavar="HOST",
        help="hosts that images may be fetched from by http: and https: addresses: HOST, HOST:PORT where it is neither 80 nor "
        "443, HOST=CIDR where its addresses are private (default: none, images come with the request)",
    )
    add(
        "--allowed-local-media-path",
        default="",
        metavar="FOLDER",
        help="a folder below which requests may read images by file: addresses (default: none)",
    )
    add(
        "--mm-processor-kwargs",
        action=JsonObject,
        default={},
        metavar="JSON",
        help="settings of the checkpoint's image processor, like {\"max_pixels\": 1003520} (default: the checkpoint's)",
    )
    add(
        "--trust-request-mm-kwargs",
        action=Switch,
        default=False,
        help="allow requests to say with mm_processor_kwargs how large their images become (default: off, they get 400)",
    )
    add(
        "--mm-processor-cache-gb",
        type=float,
        default=4.0,
        metavar="GIB",
        help="memory of each HTTP process for preprocessed images (default: %(default)g)",
    )
    add(
        "--mm-processor-workers",
        type=int,
        default=None,
        metavar="N",
        help="processes that decode images, shared out among the HTTP processes (default: half of the CPU cores, at most 4)",
    )
    add(
        "--max-media-body-mib",
        type=int,
        default=64,
        help="the largest request body where the model takes images, MiB (default: %(default)s)",
    )


def media_options(parser: CommandParser, args: argparse.Namespace) -> "MediaOptions":
    """Ends the program for values that cannot be used."""
    from quire.frontend.media.children import num_children
    from quire.frontend.media.options import MediaOptions, parse_domain
    from quire.ipc.process.cpus import cpu_share

    limits = _limits(parser, args.limit_mm_per_prompt)
    if not 0 <= args.mm_processor_cache_gb < float("inf"):
        parser.error("--mm-processor-cache-gb must be at least 0")
    if args.mm_processor_workers is not None and not 1 <= args.mm_processor_workers <= 256:
        parser.error("--mm-processor-workers must be between 1 and 256")
    if not 1 <= args.max_media_body_mib <= _MOST_BODY_MIB:
        parser.error(f"--max-media-body-mib must be between 1 and {_MOST_BODY_MIB}")
    if args.allowed_local_media_path and not os.path.isdir(args.allowed_local_media_path):
        parser.error(f"--allowed-local-media-path: {args.allowed_local_media_path} is no folder")
    domains = [name for given in args.allowed_media_domains for name in given.split(",") if name]
    try:
        for name in domains:
            parse_domain(name)
    except ValueError as error:
        parser.error(f"--allowed-media-domains: {error}")
    return MediaOptions(
        limits=limits,
        domains=tuple(domains),
        local_path=args.allowed_local_media_path,
        num_children=num_children(args.mm_processor_workers, args.frontends, int(cpu_share())),
        cache_bytes=int(args.mm_processor_cache_gb * (1 << 30)),
        processor_options=args.mm_processor_kwargs,
        trusts_requests=args.trust_request_mm_kwargs,
        max_body_bytes=args.max_media_body_mib << 20,
    )


def _limits(parser: CommandParser, given: dict[str, Any]) -> dict[str, int]:
    limits = {}
    for kind, value in given.items():
        number = value.get("count", 999) if isinstance(value, dict) else value  # vLLM's longer form has a count
        if kind not in _KINDS or type(number) is not int or number < 0:
            parser.error(f"--limit-mm-per-prompt: {kind}: numbers from 0 on are taken for {', '.join(_KINDS)}")
        limits[kind] = number
    return limits


def takes_text_alone(args: argparse.Namespace) -> bool:
    """Whether the flags say that no image may come, so that the engine needs no encoder."""
    return args.limit_mm_per_prompt.get("image") == 0
