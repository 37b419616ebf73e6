"""Short chat templates of well-known checkpoints, written after their model cards' formats, and the parsers that they need.

Each has what its model's own template has: how turns begin and end, what is said of calls, how a call in the history is
written, and how an answer is begun.
"""

NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
EACH, DONE = "{% for c in m.tool_calls %}", "{% endfor %}"
ITEMS = "{% for k, v in c.function.arguments.items() %}"
KEY, VALUE = "{{ k }}", "{{ v if v is string else v | tojson }}"
COMMA = "{% if not loop.last %}, {% endif %}"


def template(start: str, end: str, calls: str = "", intro: str = "", answer: str = "", thought: str = "") -> str:
    """start: before a message, with its role as m.role. answer: what begins an answer. thought: how reasoning is written."""
    said = f"{{% if m.tool_calls %}}{calls}{{% else %}}{{{{ m.content }}}}{{% endif %}}" if calls else "{{ m.content }}"
    tools = f"{{% if tools %}}{intro}{{% for t in tools %}}{{{{ t | tojson }}}}\n{DONE}{{% endif %}}" if intro else ""
    reasoned = f"{{% if m.reasoning_content %}}{thought}{{% endif %}}" if thought else ""
    turns = f"{{% for m in messages %}}{start}{reasoned}{said}{end}{DONE}"
    return f"{tools}{turns}{{% if add_generation_prompt %}}{answer}{{% endif %}}"


def chatml(calls: str = "", intro: str = "", think: str = "", thought: str = "") -> str:
    return template("<|im_start|>{{ m.role }}\n", "<|im_end|>\n", calls, intro, f"<|im_start|>assistant\n{think}", thought)


THOUGHT = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
CLOSES = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
OPENS = "<think>\n"

# how calls are written
HERMES = EACH + '<tool_call>\n{"name": "' + NAME + '", "arguments": ' + ARGUMENTS + "}\n</tool_call>" + DONE
HERMES_INTRO = (
    "# Tools\n\nFor each function call, return a json object within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n'
)
PARAMETERS = f"{ITEMS}<parameter={KEY}>\n{VALUE}\n</parameter>\n{DONE}"
CODER = f"{EACH}<tool_call>\n<function={NAME}>\n{PARAMETERS}</function>\n</tool_call>{DONE}"
SEED = CODER.replace("tool_call>", "seed:tool_call>")
JSON_LIST = f'[{EACH}{{"name": "{NAME}", "arguments": {ARGUMENTS}}}{COMMA}{DONE}]'
LLAMA = EACH + '{"name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}" + DONE
LLAMA_INTRO = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\n'
MISTRAL_11 = f"{EACH}[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}{DONE}"
FENCED = f"{NAME}\n```json\n{ARGUMENTS}\n```"
DEEPSEEK_V3 = (
    f"<｜tool▁calls▁begin｜>{EACH}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{FENCED}<｜tool▁call▁end｜>{DONE}"
    "<｜tool▁calls▁end｜>"
)
DEEPSEEK_V31 = (
    f"<｜tool▁calls▁begin｜>{EACH}<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>{DONE}"
    "<｜tool▁calls▁end｜>"
)
PAIRS = f"{ITEMS}<arg_key>{KEY}</arg_key>\n<arg_value>{VALUE}</arg_value>\n{DONE}"
GLM_45 = f"{EACH}\n<tool_call>{NAME}\n{PAIRS}</tool_call>{DONE}"
GLM_47 = f"{EACH}<tool_call>{NAME}{PAIRS}</tool_call>{DONE}".replace("\n", "")
HY_V3 = f"<tool_calls>\n{EACH}<tool_call>{NAME}<tool_sep>\n{PAIRS}</tool_call>\n{DONE}</tool_calls>"
INVOKED = f'{ITEMS}<parameter name="{KEY}">{VALUE}</parameter>\n{DONE}'
MINIMAX = f'<minimax:tool_call>\n{EACH}<invoke name="{NAME}">\n{INVOKED}</invoke>\n{DONE}</minimax:tool_call>'
NUMBERED = "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>" + ARGUMENTS + "<|tool_call_end|>"
KIMI = f"<|tool_calls_section_begin|>{EACH}{NUMBERED}{DONE}<|tool_calls_section_end|>"
QUOTED = '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}'
GEMMA_4 = (
    f"{EACH}<|tool_call>call:{NAME}{{{{ '{{' }}}}{ITEMS}{KEY}:{QUOTED}{COMMA.replace(', ', ',')}{DONE}}}<tool_call|>{DONE}"
)
FUNCTION_GEMMA = (
    GEMMA_4.replace("<|tool_call>", "<start_function_call>")
    .replace("<tool_call|>", "<end_function_call>")
    .replace('<|"|>', "<escape>")
)
KEYWORDS = ITEMS + "{{ k }}={% if v is string %}'{{ v }}'{% else %}{{ v | tojson }}{% endif %}" + COMMA + DONE
LFM2 = f"<|tool_call_start|>[{EACH}{NAME}({KEYWORDS}){COMMA}{DONE}]<|tool_call_end|>"
OLMO = f"<function_calls>\n{EACH}{NAME}({KEYWORDS})\n{DONE}</function_calls>"
ACTION = '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}"
COHERE = f"<|START_ACTION|>[\n{EACH}    {ACTION}{COMMA}\n{DONE}]<|END_ACTION|>"
APERTUS = f'<|tools_prefix|>[{EACH}{{"{NAME}": {ARGUMENTS}}}{COMMA}{DONE}]<|tools_suffix|>'
GIGACHAT = f'{EACH}function call<|role_sep|>\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}{DONE}'
NEMOTRON_2 = f'<TOOLCALL>[{EACH}{{"name": "{NAME}", "arguments": {ARGUMENTS}}}{COMMA}{DONE}]</TOOLCALL>'
GRANITE_20B = f'{EACH}<function_call> {{"name": "{NAME}", "arguments": {ARGUMENTS}}} {DONE}'

# how turns begin and end
LLAMA_3 = ("<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n", "<|eot_id|>")
LLAMA_4 = ("<|header_start|>{{ m.role }}<|header_end|>\n\n", "<|eot|>")
INST = ("{% if m.role == 'user' %}[INST] {% endif %}", "{% if m.role == 'user' %} [/INST]{% else %}</s>{% endif %}")
DEEPSEEK = ("{% if m.role == 'user' %}<｜User｜>{% else %}<｜Assistant｜>{% endif %}", "")
GLM = ("<|{{ m.role }}|>\n", "")
KIMI_TURN = ("<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>", "<|im_end|>")
GEMMA_TURN = ("<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n", "<end_of_turn>\n")
GEMMA_4_TURN = ("<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n", "<turn|>\n")
GRANITE_TURN = ("<|start_of_role|>{{ m.role }}<|end_of_role|>", "<|end_of_text|>\n")
PHI = ("<|{{ m.role }}|>", "<|end|>")
COHERE_TURN = ("<|START_OF_TURN_TOKEN|><|{{ m.role | upper }}_TOKEN|>", "<|END_OF_TURN_TOKEN|>")
MINIMAX_TURN = ("]~b]{{ 'ai' if m.role == 'assistant' else m.role }}\n", "[e~[\n")

# checkpoint, template, --tool-call-parser, --reasoning-parser; None: the template shows no format
CHECKPOINTS = [
    ("Qwen/Qwen2.5-7B-Instruct", chatml(HERMES, HERMES_INTRO), "hermes", None),
    ("Qwen/QwQ-32B", chatml(HERMES, HERMES_INTRO, OPENS, THOUGHT), "hermes", "qwen3"),
    ("Qwen/Qwen3-8B", chatml(HERMES, HERMES_INTRO, CLOSES, THOUGHT), "hermes", "qwen3"),
    ("Qwen/Qwen3-30B-A3B-Thinking-2507", chatml(HERMES, HERMES_INTRO, OPENS, THOUGHT), "hermes", "qwen3"),
    ("Qwen/Qwen3-VL-8B-Instruct", chatml(HERMES, HERMES_INTRO), "hermes", None),
    ("Qwen/Qwen3-Coder-30B-A3B-Instruct", chatml(CODER, "If you choose to call a function:\n"), "qwen3_coder", None),
    ("NousResearch/Hermes-3-Llama-3.1-8B", chatml(HERMES, HERMES_INTRO), "hermes", None),
    ("HuggingFaceTB/SmolLM3-3B", chatml(HERMES, HERMES_INTRO, CLOSES, THOUGHT), "hermes", "qwen3"),
    (
        "LGAI-EXAONE/EXAONE-4.0-32B",
        template("[|{{ m.role }}|]\n", "[|endofturn|]\n", HERMES, HERMES_INTRO, "[|assistant|]\n<think>\n", THOUGHT),
        "hermes",
        "qwen3",
    ),
    ("XiaomiMiMo/MiMo-V2-Flash", chatml(CODER, "# Tools\n", CLOSES, THOUGHT), "mimo", "mimo"),
    (
        "ByteDance-Seed/Seed-OSS-36B-Instruct",
        template(
            "<seed:bos>{{ m.role }}\n",
            "<seed:eos>",
            SEED,
            "Tool List:\n",
            "",
            "<seed:think>{{ m.reasoning_content }}</seed:think>",
        ),
        "seed_oss",
        "seed_oss",
    ),
    ("meta-llama/Llama-3.1-8B-Instruct", template(*LLAMA_3, LLAMA, LLAMA_INTRO), "llama3_json", None),
    ("meta-llama/Llama-3.2-3B-Instruct", template(*LLAMA_3, LLAMA, LLAMA_INTRO), "llama3_json", None),
    ("meta-llama/Llama-3.3-70B-Instruct", template(*LLAMA_3, LLAMA, LLAMA_INTRO), "llama3_json", None),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", template(*LLAMA_4, LLAMA, LLAMA_INTRO), "llama4_json", None),
    (
        "Team-ACE/ToolACE-8B",
        template(*LLAMA_3, "", "Answer as [func_name1(params_name1=params_value1), func_name2(params)]\n"),
        "pythonic",
        None,
    ),
    ("mistralai/Mistral-7B-Instruct-v0.3", template(*INST, f"[TOOL_CALLS] {JSON_LIST}", "[AVAILABLE_TOOLS] "), "mistral", None),
    ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", template(*INST, MISTRAL_11, "[AVAILABLE_TOOLS]"), "mistral", None),
    (
        "mistralai/Magistral-Small-2509",
        template(*INST, MISTRAL_11, "[AVAILABLE_TOOLS]", "", "[THINK]{{ m.reasoning_content }}[/THINK]"),
        "mistral",
        "mistral",
    ),
    ("mistralai/Mixtral-8x7B-Instruct-v0.1", template(*INST), None, None),
    ("deepseek-ai/DeepSeek-V3-0324", template(*DEEPSEEK, DEEPSEEK_V3, "", "<｜Assistant｜>"), "deepseek_v3", None),
    (
        "deepseek-ai/DeepSeek-R1",
        template(*DEEPSEEK, DEEPSEEK_V3, "", "<｜Assistant｜><think>\n", THOUGHT),
        "deepseek_v3",
        "deepseek_r1",
    ),
    (
        "deepseek-ai/DeepSeek-V3.1",
        template(*DEEPSEEK, DEEPSEEK_V31, "## Tools\n", "<｜Assistant｜>{% if thinking %}<think>{% else %}</think>{% endif %}"),
        "deepseek_v31",
        "deepseek_v3",
    ),
    (
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        template(*DEEPSEEK, DEEPSEEK_V3, "", "<｜Assistant｜><think>\n", THOUGHT),
        "deepseek_v3",
        "deepseek_r1",
    ),
    ("zai-org/GLM-4.5-Air", template(*GLM, GLM_45, "# Tools\n", "<|assistant|>\n" + CLOSES, THOUGHT), "glm45", "glm45"),
    ("zai-org/GLM-4.6", template(*GLM, GLM_45, "# Tools\n", "<|assistant|>\n" + CLOSES, THOUGHT), "glm45", "glm45"),
    ("zai-org/GLM-4.7-Flash", template(*GLM, GLM_47, "# Tools\n", "<|assistant|><think>", THOUGHT), "glm47", "glm45"),
    ("zai-org/GLM-4-9B-0414", template(*GLM, EACH + NAME + "\n" + ARGUMENTS + "{% endfor %}", "# 可用工具\n"), None, None),
    (
        "MiniMaxAI/MiniMax-M2",
        template(*MINIMAX_TURN, MINIMAX, "# Tools\n", "]~b]ai\n<think>\n", THOUGHT),
        "minimax_m2",
        "minimax_m2",
    ),
    ("moonshotai/Kimi-K2-Instruct", template(*KIMI_TURN, KIMI, "<|im_system|>tool_declare<|im_middle|>"), "kimi_k2", None),
    (
        "moonshotai/Kimi-K2-Thinking",
        template(*KIMI_TURN, KIMI, "<|im_system|>tool_declare<|im_middle|>", "", "<think>{{ m.reasoning_content }}</think>"),
        "kimi_k2",
        "kimi_k2",
    ),
    ("LiquidAI/LFM2-1.2B", chatml(intro="List of tools: <|tool_list_start|>["), "lfm2", None),
    ("LiquidAI/LFM2.5-1.2B-Instruct", chatml(intro="List of tools: ["), "lfm2", None),
    ("LiquidAI/LFM2.5-1.2B-Thinking", chatml(LFM2, "List of tools: [", thought=THOUGHT), "lfm2", "qwen3"),
    (
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        template(*KIMI_TURN, KIMI, "<|im_system|>tool_declare<|im_middle|>"),
        "kimi_k2",
        None,
    ),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", chatml(CODER, "# Tools\n", OPENS, THOUGHT), "qwen3_coder", "qwen3"),
    ("ibm-granite/granite-4.0-h-tiny", template(*GRANITE_TURN, HERMES, HERMES_INTRO), "granite4", None),
    ("google/gemma-3-27b-it", template(*GEMMA_TURN), None, None),
    (
        "google/gemma-4-31b-it",
        template(
            *GEMMA_4_TURN, GEMMA_4, "<|tool>", "<|turn>model\n", "<|channel>thought\n{{ m.reasoning_content }}\n<channel|>"
        ),
        "gemma4",
        "gemma4",
    ),
    (
        "google/functiongemma-270m-it",
        template(*GEMMA_TURN, FUNCTION_GEMMA, "<start_function_declaration>"),
        "functiongemma",
        None,
    ),
    (
        "ibm-granite/granite-3.3-8b-instruct",
        template(
            *GRANITE_TURN,
            f"<|tool_call|>{JSON_LIST}",
            "Respond with <|tool_call|> followed by a JSON list of tools used.\n",
            "",
            "Write your thoughts between <think></think> and your response between <response></response>.",
        ),
        "granite",
        "granite",
    ),
    (
        "ibm-granite/granite-3.2-8b-instruct",
        template(
            *GRANITE_TURN,
            f"<|tool_call|>{JSON_LIST}",
            "<|tool_call|>",
            "",
            "Write it after 'Here is my thought process:' and then after 'Here is my response:'.",
        ),
        "granite",
        "granite",
    ),
    ("ibm-granite/granite-4.0-micro", template(*GRANITE_TURN, HERMES, HERMES_INTRO), "granite4", None),
    (
        "ibm-granite/granite-20b-functioncalling",
        template("{{ m.role | upper }}: ", "\n", GRANITE_20B, "<|function_call_library|>"),
        "granite-20b-fc",
        None,
    ),
    (
        "microsoft/Phi-4-mini-instruct",
        template(*PHI, f"<|tool_call|>{JSON_LIST}<|/tool_call|>", "<|tool|>{{ '' }}<|/tool|>"),
        "phi4_mini_json",
        None,
    ),
    (
        "microsoft/Phi-4-mini-instruct of vLLM's examples",
        template(*PHI, f"functools{JSON_LIST}", "as functools[{...}]\n"),
        "phi4_mini_json",
        None,
    ),
    (
        "microsoft/Phi-4-reasoning",
        chatml(think="", thought="<think> {Thought section} </think> {Solution section}"),
        None,
        "qwen3",
    ),
    ("allenai/Olmo-3-7B-Instruct", chatml(OLMO, "<functions>"), "olmo3", None),
    ("allenai/Olmo-3-7B-Think", chatml(think="<think>", thought=THOUGHT), None, "olmo3"),
    (
        "tencent/Hunyuan-A13B-Instruct",
        template(
            "<|{{ m.role }}|>",
            "<|eos|>",
            f"<tool_calls>{JSON_LIST}</tool_calls>",
            "",
            CLOSES,
            "<think>\n{{ m.reasoning_content }}\n</think>\n<answer>\n</answer>",
        ),
        "hunyuan_a13b",
        "hunyuan_a13b",
    ),
    ("tencent/Hy3-preview", template("<|{{ m.role }}|>", "<|eos|>", HY_V3, "# Tools\n", "<think>", THOUGHT), "hy_v3", "hy_v3"),
    (
        "ServiceNow-AI/Apriel-1.5-15b-Thinker",
        template(
            "<|{{ m.role }}|>\n", "<|end|>\n", f"<tool_calls>{JSON_LIST}</tool_calls>", "within <tool_calls></tool_calls>\n"
        ),
        "hunyuan_a13b",
        None,
    ),
    (
        "baidu/ERNIE-4.5-21B-A3B-Thinking",
        chatml(HERMES, HERMES_INTRO, OPENS, THOUGHT + "<response>\n</response>"),
        "ernie45",
        "ernie45",
    ),
    (
        "Salesforce/Llama-xLAM-2-8b-fc-r",
        template(
            *LLAMA_3,
            JSON_LIST,
            'make calls in a single JSON array: [{"name": "tool_call_name", "arguments": {"arg1": "value1"}}]\n',
        ),
        "xlam",
        None,
    ),
    (
        "CohereLabs/c4ai-command-r7b-12-2024",
        template(
            *COHERE_TURN,
            COHERE,
            "## Available Tools\n",
            "",
            "<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|><|START_RESPONSE|>",
        ),
        "cohere_command3",
        "cohere_command3",
    ),
    (
        "CohereLabs/command-a-plus",
        template(
            *COHERE_TURN,
            COHERE,
            "## Available Tools\n",
            "",
            "<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|><|START_TEXT|>",
        ),
        "cohere_command4",
        "cohere_command4",
    ),
    ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", template("<SPECIAL_11>{{ m.role }}\n", "\n", NEMOTRON_2), "nemotron_json", None),
    ("ai-sage/GigaChat3-10B-A1.8B", template("{{ m.role }}<|role_sep|>\n", "<|message_sep|>\n\n", GIGACHAT), "gigachat3", None),
    ("swiss-ai/Apertus-8B-Instruct-2509", template("<|{{ m.role }}_start|>", "<|{{ m.role }}_end|>", APERTUS), "apertus", None),
    (
        "poolside/Laguna-XS.2",
        template("<{{ m.role }}>\n", "</{{ m.role }}>\n", GLM_45, "# Tools\n", "<assistant>\n<think>", THOUGHT),
        "poolside_v1",
        "poolside_v1",
    ),
    (
        "meituan-longcat/LongCat-Flash-Chat",
        template("[{{ m.role }}] ", "</s>", HERMES.replace("tool_call>", "longcat_tool_call>"), "# Tools\n"),
        "longcat",
        None,
    ),
]
