"""A chat template in Harmony. It has the demands of gpt-oss's own on calls, on texts beside them, and on system messages."""

TEMPLATE = """<|start|>system<|message|>Reasoning: {{ reasoning_effort | default("medium") }}<|end|>
{%- set first = messages[0].role in ("system", "developer") -%}
{%- if first or tools -%}
<|start|>developer<|message|>
{%- if first -%}# Instructions {{ messages[0].content }}{%- endif -%}
{%- for tool in tools or [] -%}{{ "// " + tool.function.description + " type " + tool.function.name }};{%- endfor -%}
<|end|>
{%- endif -%}
{%- set called = namespace(name=none) -%}
{%- for message in (messages[1:] if first else messages) -%}
{%- if message.role == "assistant" and "tool_calls" in message -%}
  {%- if message.content and message.thinking -%}{{- raise_exception("both content and thinking") -}}{%- endif -%}
  {%- if message.content or message.thinking -%}
    {{- "<|start|>assistant<|channel|>analysis<|message|>" + (message.content or message.thinking) + "<|end|>" -}}
  {%- endif -%}
  {%- set called.name = message.tool_calls[0].function.name -%}
  {{- "<|start|>assistant to=functions." + called.name + "<|channel|>commentary json<|message|>" -}}
  {{- message.tool_calls[0].function.arguments | tojson + "<|call|>" -}}
{%- elif message.role == "assistant" -%}
  {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + ("<|return|>" if loop.last else "<|end|>") -}}
{%- elif message.role == "tool" -%}
  {%- if called.name is none -%}{{- raise_exception("no call") -}}{%- endif -%}
  {{- "<|start|>functions." + called.name + " to=assistant<|channel|>commentary<|message|>" -}}
  {{- message.content | tojson + "<|end|>" -}}
{%- elif message.role == "user" -%}
  {{- "<|start|>user<|message|>" + message.content + "<|end|>" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
