"""Bounds on media items: the parts of a prompt that get their embeddings from an encoder. Each bound is here, once.

The frontend checks them while it makes an item, the core checks them again when a request arrives.
"""

DIGEST_BYTES = 32  # of an item: sha256
MAX_ITEMS = 1024  # of a request
MAX_SPANS = 4096  # of an item
MAX_TENSORS = 8  # of an item
MAX_DIMENSIONS = 8  # of a tensor
ITEM_BYTES = 2 * (64 << 20)  # of items on their way to the workers, beyond one that is larger
MAX_AXES = 3  # of rotary positions
MAX_CHANNELS = 16  # with a scale and an offset
MAX_TENSOR_BYTES = 64 << 20  # it travels as one ZeroMQ frame
ITEM_SIZES = {"uint8": 1, "float32": 4, "int64": 8}  # bytes of an element, by the dtypes that tensors may have

# Bounds of the frontend on what it reads.
MEDIA_CHILD_BYTES = 2 << 30  # of memory, that a process which reads images may take beyond what it has when it is ready
MEDIA_CPU_S = 10.0  # of CPU time, for an image
MAX_IMAGE_PIXELS = 64_000_000
MAX_IMAGE_SIDE = 16_384
MAX_REQUEST_PIXELS = 256_000_000  # of all images of a request
MAX_IMAGES = 64  # of a prompt, unless --limit-mm-per-prompt says otherwise
FETCH_S = 5.0  # for an image by its address
MAX_FETCHES, MAX_FETCHES_OF_KEY = 32, 8  # at once, of a frontend and of an API key
MAX_MEDIA_BYTES = 64 << 20  # of all items of a request, as they come
REFUSED_S = 600.0  # how long a key's item that ended two processes is refused
MAX_HELD_MEDIA_BYTES = 1 << 30  # sources of all running requests of a frontend
