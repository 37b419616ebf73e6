"""The model that a request names: a name of the served model, or that of a LoRA adapter. Every route with a `model` asks here.

The adapter is noted on the request, from where its terms take it (terms.py). A key that may not name a model is told that it
does not exist.
"""

from quire.frontend.client import adapter_calls
from quire.frontend.client.stream import InvalidRequest, NotFound
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request

ONE_TASK = (
    "a request can choose a task's weights only where the model has adapters for tasks and the server has --enable-lora; "
    "--hf-overrides '{\"jina_task\": ...}' chooses one at the start"
)


async def check_model(services: Services, request: Request, name: str | None) -> str:
    """The model's name to answer with. Without a name, or with an empty one, the first served one, as vLLM does.

    Raises ApiError 404; 400 for an adapter that cannot be loaded."""
    served = services.model_names
    if not name:
        name = served[0]
    if not services.key_limits.may_use(request.owner, name):
        raise not_found(name)
    if name not in served:
        await _note_adapter(services, request, name)
    return name


async def check_task(services: Services, request: Request, task: object) -> None:
    """Let a request have the adapter of a model's own task, which it names, if it does. Raises ApiError 400."""
    if task is None:
        return
    limits = services.client.welcome.limits.adapters
    tasks = () if limits is None else limits.tasks
    if not tasks:
        raise invalid(f"task: {ONE_TASK}", "task")
    if not isinstance(task, str) or task not in tasks:
        raise invalid(f"task must be one of {', '.join(tasks)} for this model", "task")
    if request.adapter is not None:
        raise invalid("task: the request's model is an adapter, which is for one task", "task")
    await _note_adapter(services, request, task)


async def _note_adapter(services: Services, request: Request, name: str) -> None:
    client = services.client
    info = client.adapters.get(name)
    if info is None:
        if client.welcome.limits.adapters is None:
            raise not_found(name)
        try:
            info = await adapter_calls.find(client, name, request.owner)
        except NotFound:
            raise not_found(name) from None
        except InvalidRequest as error:
            raise invalid(str(error), "model") from None
    request.adapter = adapter_calls.use_of(info)


def not_found(name: str) -> ApiError:
    return ApiError(404, f"The model {name!r} does not exist.", param="model", code="model_not_found")
