"""Effects of the flags of `quire serve` and `enginecore` on memory and throughput, and usual values: for docs/configuration.md.

Purpose and default are in each flag's help. The page is made of both, and a test fails if a flag has no line here. A server
does not read this.
"""

from typing import NamedTuple


class FlagNote(NamedTuple):
    """effect: on memory, throughput or latency; "" if there is hardly any. typical: usual values."""

    effect: str
    typical: str


_NONE = FlagNote("", "")
_KEY = FlagNote("", "one a client or team")
_HUB = FlagNote("", "a commit, so that every start serves the same weights")

FLAG_NOTES: dict[str, FlagNote] = {
    "model": FlagNote(
        "weights are the largest part of the memory: `quire estimate MODEL` says how large", "a folder on local disk"
    ),
    "--model": _NONE,
    "--config": FlagNote("", "a file in version control"),
    "--profiler-config": _NONE,
    # ---------------------------------------------------------------------------------------------------------- server
    "--host": FlagNote("", "127.0.0.1 behind a proxy on the same host, 0.0.0.0 in a container"),
    "--port": FlagNote("", "8000"),
    "--frontends": FlagNote(
        "some 60 MB and a tokenizer in each process; more streams where one event loop is the limit "
        "(quire:frontend_lag_seconds grows), no difference where the GPU is",
        "1; 2 to 4 for many hundreds of streams",
    ),
    "--max-connections": FlagNote("a file descriptor each; no more than there are (`ulimit -n`)", "8192"),
    "--max-body-mib": FlagNote(
        "bodies are held whole while they are read: up to 1 GiB of them in a process", "8; 32 for very long prompts"
    ),
    "--h11-max-header-count": FlagNote("", "100"),
    "--h11-max-incomplete-event-size": FlagNote("", "32768; more where cookies are large"),
    "--keep-alive-timeout-s": FlagNote("", "longer than the proxy's own, so that the proxy closes first"),
    "--shutdown-grace-s": FlagNote("", "as long as your longest usual answer: 30 to 300"),
    "--uds": FlagNote("saves the TCP stack between a proxy and the server on one host", "/run/quire/http.sock"),
    "--uds-mode": FlagNote("", "660, with the proxy's user in the group"),
    "--root-path": FlagNote("", "/llm, where a proxy passes it on"),
    "--drain-delay-s": FlagNote("", "two periods of the balancer's health check: 5 to 15"),
    "--max-response-mib": FlagNote("answers are encoded in pieces: this bounds work, not memory", "128"),
    "--ssl-certfile": FlagNote("TLS costs CPU of a frontend: a proxy may do it instead", "fullchain.pem"),
    "--ssl-keyfile": FlagNote("", "privkey.pem, readable to the server's user only"),
    "--ssl-ca-certs": FlagNote("", "the CA of your clients, with --ssl-cert-reqs 2"),
    "--ssl-cert-reqs": FlagNote("", "0; 2 for clients with certificates"),
    "--ssl-ciphers": FlagNote("", "leave it out"),
    "--enable-ssl-refresh": FlagNote("", "on, where certificates are renewed by a robot"),
    # ---------------------------------------------------------------------------------------------------------- access
    "--api-key": _KEY,
    "--api-key-file": FlagNote("", "a mounted secret"),
    "--admin-api-key": FlagNote("", "one for operators, where keys are given to others; the file, as a process list shows it"),
    "--admin-api-key-file": FlagNote("", "a mounted secret"),
    "--allowed-hosts": FlagNote("", "leave it out; the names of the server, where browsers reach it without keys"),
    "--limits": FlagNote("each key has its own part of the prefix cache", "a file, where several clients share a server"),
    "--metrics-open": FlagNote("", "on, where the scraper is in the same network and has no key"),
    "--disable-fastapi-docs": FlagNote("", "off; on where strangers connect"),
    "--allowed-origins": FlagNote("", "the origins of your web pages; * with keys only"),
    "--allowed-methods": FlagNote("", "leave it out"),
    "--allowed-headers": FlagNote("", "leave it out"),
    "--allow-credentials": FlagNote("", "off"),
    # ----------------------------------------------------------------------------------------------- files and batches
    "--files-dir": FlagNote(
        "disk: up to --max-files-mib, and 256 MiB of stored responses", "a folder on a local disk, kept over restarts"
    ),
    "--max-files-mib": FlagNote("disk, never memory", "4096"),
    # ---------------------------------------------------------------------------------------------------------- images
    "--language-model-only": FlagNote("saves the encoder's weights, its cache and the memory of its largest run", "off"),
    "--encoder-cache-tokens": FlagNote("a row of the hidden size each, times 1 + DeepStack's layers", "leave it out"),
    "--limit-mm-per-prompt": FlagNote("an image has hundreds to thousands of tokens", '{"image": 8}'),
    "--allowed-media-domains": FlagNote("fetches cost the time of the other server", "your own store; leave it out otherwise"),
    "--allowed-local-media-path": FlagNote("", "a folder of images alone"),
    "--mm-processor-kwargs": FlagNote("fewer pixels are fewer tokens", '{"max_pixels": 1003520}'),
    "--trust-request-mm-kwargs": FlagNote("larger images are more tokens, up to --encoder-cache-tokens", "off"),
    "--mm-processor-cache-gb": FlagNote("memory of each HTTP process: 3 MB for a preprocessed megapixel", "4"),
    "--mm-processor-workers": FlagNote(
        "a CPU core and 150 MB each while images come; some 20 images of a megapixel a second", "the cores that are free"
    ),
    "--max-media-body-mib": FlagNote("bodies are held whole while they are read", "64"),
    # -------------------------------------------------------------------------------------------------------- requests
    "--trust-request-chat-template": FlagNote(
        "one core, 512 MiB; such templates wait for each other, other requests do not", "off"
    ),
    "--request-timeout-s": FlagNote("requests without a client that waits take no slots", "the longest that your clients wait"),
    "--response-role": FlagNote("", "assistant"),
    "--default-chat-template-kwargs": FlagNote("without reasoning, answers are shorter", '{"enable_thinking": false}'),
    "--return-tokens-as-token-ids": _NONE,
    "--enable-force-include-usage": FlagNote("", "on, behind a gateway that counts tokens"),
    "--enable-request-id-headers": FlagNote("", "on, where logs of several services are joined"),
    "--tool-call-parser": FlagNote("", "auto"),
    "--reasoning-parser": FlagNote("", "auto; deepseek_r1 or qwen3 where a model always thinks"),
    # -------------------------------------------------------------------------------------------------- running engine
    "--router": FlagNote(
        "cache-aware remembers the blocks of prompts: 120 bytes for each block of the engines' caches; 0.1 ms a request",
        "cache-aware",
    ),
    "--engine": FlagNote("an engine may have frontends on other machines: text is made there", "ipc:///run/quire/engine.sock"),
    "--curve-key-file": FlagNote("", "frontend.key"),
    "--curve-engine-key": FlagNote("", "the public key that the engine logs at its first start, in quotes"),
    # -------------------------------------------------------------------------------------------- access log and traces
    "--access-log": FlagNote("a line a request; it is written by a thread", "off; on behind no proxy"),
    "--disable-uvicorn-access-log": _NONE,
    "--no-disable-uvicorn-access-log": _NONE,
    "--disable-access-log-for-endpoints": FlagNote("", "/health,/metrics"),
    "--otlp-traces-endpoint": FlagNote("some 0.25 ms of a frontend's CPU a traced request", "http://collector:4318"),
    # ----------------------------------------------------------------------------------------------------------- model
    "--revision": _HUB,
    "--download-dir": FlagNote("disk: the size of the weights", "a volume that outlives the container"),
    "--hf-token": FlagNote("", "HF_TOKEN in the environment"),
    "--served-model-name": FlagNote("", "one stable name, whatever the folder is called"),
    "--tokenizer": _NONE,
    "--tokenizer-revision": _HUB,
    "--hf-overrides": FlagNote("a change of the model's size changes the memory", "a longer context by rope_scaling"),
    "--dtype": FlagNote("float32 takes twice the memory of bfloat16, and is several times slower on a GPU", "auto"),
    "--load-format": FlagNote("dummy starts without reading weights, to measure speed", "auto"),
    "--model-impl": FlagNote(
        "transformers' layers take some more time a step than Quire's own of the same model, and as much memory", "auto"
    ),
    "--runner": FlagNote("with pooling the head over the vocabulary is not loaded", "auto"),
    "--convert": FlagNote("with embed a model that generates keeps its head, too", "auto; embed for vectors of any decoder"),
    "--pooler-config": FlagNote("prefixes in the cache are found only where the LAST token is pooled", "leave it out"),
    "--quantization": FlagNote(
        "on a CPU the memory and time of floats: weights are rounded, and computed with as floats. int4 gives worse answers, "
        "the others nearly the same",
        "leave it out; fp8_per_channel",
    ),
    "--max-model-len": FlagNote(
        "no memory by itself, but for tables; bounds what one request may take of the KV cache, and so how many run at once",
        "what your users need: 8k to 32k",
    ),
    # --------------------------------------------------------------------------------------- chat template and sampling
    "--chat-template": FlagNote("", "leave it out, unless the model has none"),
    "--chat-template-content-format": FlagNote("", "auto"),
    "--generation-config": FlagNote("", "auto; vllm for plain defaults"),
    "--override-generation-config": FlagNote("a lower max_tokens ends long answers", '{"temperature": 0.6}'),
    "--max-logprobs": FlagNote("logprobs make answers longer; 0: each token's own only; above 20 they cost more a step", "20"),
    # ----------------------------------------------------------------------------------------------- device and memory
    "--device": FlagNote("a CPU serves small models only", "auto"),
    "--tensor-parallel-size": FlagNote(
        "each GPU holds a shard of the weights and of the KV cache; an exchange twice a layer costs time",
        "1 where the model fits into one GPU, else 2, 4 or 8",
    ),
    "--pipeline-parallel-size": FlagNote(
        "each GPU holds some of the layers and their KV cache; throughput grows, one answer comes no sooner",
        "1; 2 or more where GPUs are joined too slowly for --tensor-parallel-size, or its sizes do not divide the model",
    ),
    "--data-parallel-size": FlagNote(
        "as many times the memory, and nearly as many tokens a second; one request is no quicker",
        "the number of GPUs, for a model that fits into one",
    ),
    "--distributed-executor-backend": FlagNote("", "mp; ray where a Ray cluster has the GPUs"),
    "--hosts": FlagNote("exchanges cross the network: InfiniBand or RoCE, or they are most of a step", "leave it out"),
    "--hosts-key-file": FlagNote("", "a file of the server's user, mode 0600"),
    "--interface": FlagNote("", "with --hosts the interface of the private network that joins the hosts"),
    "--gpu-memory-utilization": FlagNote(
        "the KV cache gets this part of the memory less weights, a step and graphs: more is more requests at once and more "
        "prefix hits",
        "0.9; 0.95 where nothing else is on the GPU, less beside other processes",
    ),
    "--cpu-kv-cache-gib": FlagNote("memory of this size: more is more requests at once", "leave it out"),
    "--kv-cache-memory-bytes": FlagNote("the KV cache's size itself; no measuring of what is free", "leave it out"),
    "--num-gpu-blocks-override": FlagNote("the same, in blocks: for tests", "leave it out"),
    "--num-states": FlagNote(
        "the memory of a model with recurrent layers: more states are more requests at once and more prefix hits, fewer leave "
        "more to KV blocks",
        "leave it out",
    ),
    "--mamba-ssm-cache-dtype": FlagNote(
        "16 bits halve what a decode row reads and writes; answers change a little. float16 is rounded by chance, by a hash of "
        "the token's position, so that small changes of a state add up: the same request gets the same tokens again",
        "auto",
    ),
    "--kv-cache-dtype": FlagNote(
        "fp8 holds twice the tokens of 16 bits; answers change a little, more where the checkpoint has no scales", "auto; fp8"
    ),
    "--kv-cache-dtype-skip-layers": FlagNote("these layers take the memory of 16 bits", "leave it out"),
    "--block-size": FlagNote(
        "smaller blocks waste less at a sequence's end and share shorter prefixes; larger ones are fewer to keep", "64 on a GPU"
    ),
    "--enforce-eager": FlagNote(
        "saves the memory of graphs and seconds at the start; decode steps of small batches get much slower", "off"
    ),
    "--deterministic": FlagNote(
        "no more memory; decode steps of 64 rows and prompts take longer (README), long contexts at few rows much longer",
        "off; on where the same request has to get the same tokens to the last bit, in training by reinforcement or in audits",
    ),
    "--seed": _NONE,
    # ---------------------------------------------------------------------------------------- batching and scheduling
    "--max-num-seqs": FlagNote(
        "tables and logits of so many rows; more is more throughput as long as the KV cache holds them, and slower tokens for "
        "each",
        "256 to 1024 for throughput, 32 to 128 for quick tokens",
    ),
    "--max-num-batched-tokens": FlagNote(
        "activations of so many tokens; more computes long prompts sooner, and lets running streams wait longer for such a "
        "step",
        "2048 for smooth streams, 8192, 16384 for long prompts in bulk",
    ),
    "--long-prefill-token-threshold": FlagNote(
        "a long prompt takes more steps, and short ones get in beside it", "0; 1024 to 2048 for long RAG"
    ),
    "--max-num-waiting": FlagNote(
        "a queue does not make a server faster: short ones refuse early, and a balancer goes elsewhere", "100 to 8192"
    ),
    "--max-num-queued-tokens": FlagNote("bounds the prompts that are held in memory", "0"),
    "--max-queue-s": FlagNote(
        "a shorter queue refuses sooner, and what it takes is answered in time", "5 to 30, less than your clients wait"
    ),
    "--enable-prefix-caching": FlagNote(
        "free blocks are kept for requests that begin alike: no memory of their own; saves prefill", "on"
    ),
    "--scheduling-policy": FlagNote(
        "with priority, less urgent requests may be preempted and computed again", "fcfs; priority for batch beside chat"
    ),
    "--admission": FlagNote(
        "lookahead keeps preemption rare; optimistic starts more at once, and computes some again", "lookahead"
    ),
    "--step-timeout-s": FlagNote("", "60"),
    "--replay": FlagNote("the tokens of what was in flight are computed again", "on"),
    "--collective-timeout-s": FlagNote("", "10; more where one step takes seconds"),
    # ---------------------------------------------------------------------------------------------------- LoRA adapters
    "--enable-lora": FlagNote("memory of the adapter slots; small products in each layer of steps with adapters", "on"),
    "--lora-modules": FlagNote("a start that also reads them", "adapters that are always needed"),
    "--max-loras": FlagNote("memory of a slot each", "as many as are asked for at once"),
    "--max-lora-rank": FlagNote("memory of each slot, in proportion", "the largest rank among the adapters"),
    "--max-cpu-loras": FlagNote("host memory of an adapter each, on every rank", "what host memory has room for"),
    "--lora-target-modules": FlagNote("memory of each slot", "the layers that the adapters have"),
    "--lora-dtype": FlagNote("memory of each slot", "auto"),
    "--lora-dirs": FlagNote("whoever may write there may serve adapters", "one folder for all adapters"),
    "--lora-hub": FlagNote("whoever may write to these owners' repositories may serve adapters", "your own organization"),
    "--lora-on-demand": FlagNote("a first request for an adapter that also waits for its load", "on with many adapters"),
    # ------------------------------------------------------------------------------------------------------ speculation
    "--speculative-config": FlagNote(
        "a sequence's text by KV slot, 4 bytes a token, logits of up to 512 places, a draft model's weights and KV cache, and "
        "with recurrent layers the inputs of 1,024 tokens, 0.6 to 2 GB; fewer steps where drafts are right, hardly slower ones "
        "where they are not (docs/speculation.md)",
        '{"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}, for code, edits and summaries',
    ),
    "--per-request-spec-decode-metrics": FlagNote("a few bytes a step of each sequence with drafts", "none"),
    "--spec-method": _NONE,
    "--spec-model": FlagNote("the model's weights, and its part of each KV block", "the smallest model of the same family"),
    "--spec-tokens": FlagNote(
        "more drafts are verified at once: wider steps, and more tokens from each that is right",
        "15; 2 to 4 with a draft model",
    ),
    # ------------------------------------------------------------------------------------------------------------ logs
    "--log-level": FlagNote("", "info"),
    "--log-format": FlagNote("", "json, where logs are collected"),
    "--enable-log-requests": FlagNote("two lines a request", "off; on to look into something"),
    "--disable-log-stats": FlagNote("", "off"),
    # ------------------------------------------------------------------------------------------- own code and profiles
    "--logits-processors": FlagNote("requests that use one take a slower end of a step; others keep theirs", "leave it out"),
    "--logits-processors-path": _NONE,
    "--enable-expert-parallel": FlagNote(
        "the same memory in sum; steps wait for the GPU with the most tokens for its experts",
        "off; on where an expert's width does not divide by the GPUs, or its shards would be narrow",
    ),
    "--emulate-world-size": FlagNote("a rank's part of weights and KV cache", "1; 4 or 8 to measure a share"),
    "--profile-dir": FlagNote(
        "nothing until /start_profile; then steps get slower, and traces are large", "leave it out in production"
    ),
    # ------------------------------------------------------------------------------------------------------ enginecore
    "--listen": FlagNote("", "ipc:///run/quire/engine.sock; tcp://0.0.0.0:5555 with keys"),
    "--curve-secret-key-file": FlagNote("", "engine.key, on a disk that stays"),
    "--curve-allow-file": FlagNote("", "frontends.allow"),
}
