"""Load and unload LoRA adapters while the server runs. Bodies, texts and codes are vLLM's; both routes need an admin key, if
there is one."""

from typing import Any

import msgspec

from quire.frontend.client import adapter_calls
from quire.frontend.client.stream import InvalidRequest, NotFound
from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request, Response

TEXT = b"text/plain; charset=utf-8"


class LoadLoRAAdapterRequest(msgspec.Struct):
    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False  # without effect: the file says it


class UnloadLoRAAdapterRequest(msgspec.Struct):
    lora_name: str = ""
    lora_int_id: int | None = None  # without effect: names are unique


class AdapterRouteError(ApiError):
    """An error with vLLM's type."""

    @property
    def type(self) -> str:
        return "NotFoundError" if self.status == 404 else "InvalidUserInput"


_load_decoder = BodyDecoder(LoadLoRAAdapterRequest)
_unload_decoder = BodyDecoder(UnloadLoRAAdapterRequest)


async def load_lora_adapter(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_load_decoder, request, services.unknown_fields)
    if not body.lora_name or not body.lora_path:
        raise _invalid("Both 'lora_name' and 'lora_path' must be provided.")
    limits = services.limits.adapters
    if limits is None or not (limits.dirs or limits.has_hub):
        flag = "--enable-lora" if limits is None else "--lora-dirs or --lora-hub"
        raise _invalid(f"Adapters cannot be loaded while this server runs: start it with {flag}.")
    if body.lora_name in services.model_names:
        raise _invalid(f"The name '{body.lora_name}' is the model's own.")
    await _called(adapter_calls.load(services.client, body.lora_name, body.lora_path, in_place=body.load_inplace))
    response.send(200, f"Success: LoRA adapter '{body.lora_name}' added successfully.".encode(), TEXT)


async def unload_lora_adapter(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_unload_decoder, request, services.unknown_fields)
    if not body.lora_name:
        raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.")
    if services.limits.adapters is None:
        raise AdapterRouteError(404, f"The lora adapter '{body.lora_name}' cannot be found.", code="404")
    await _called(adapter_calls.unload(services.client, body.lora_name))
    response.send(200, f"Success: LoRA adapter '{body.lora_name}' removed successfully.".encode(), TEXT)


async def _called(call: Any) -> None:
    try:
        await call
    except NotFound as error:
        raise AdapterRouteError(404, str(error), code="404") from None
    except InvalidRequest as error:
        raise _invalid(str(error)) from None


def _invalid(text: str) -> AdapterRouteError:
    return AdapterRouteError(400, text, code="400")
