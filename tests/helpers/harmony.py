"""A chat template in the shape of gpt-oss' own, and a tokenizer with its marks, a token for each byte of other text."""

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from megarl_lab.recipes.tiny_model import make_byte_tokenizer

MARKS = ("start", "end", "message", "channel", "constrain", "return", "call")
# Tools as a namespace in TypeScript, thoughts before the last final message left out, one call a turn, whose name the
# results repeat.
TEMPLATE = r"""
{%- macro kind(spec) -%}{{ 'number' if spec.type in ('integer', 'number') else spec.type }}{%- endmacro -%}
{{- '<|start|>system<|message|>You are a model.\n\n# Valid channels: analysis, commentary, final. Channel must be ' -}}
{{- 'included for every message.' -}}
{{- "\nCalls to these tools must go to the commentary channel: 'functions'." if tools else '' -}}
{{- '<|end|>' -}}
{%- set told = messages[0].content if messages[0].role in ('system', 'developer') else '' -%}
{%- set turns = messages[1:] if messages[0].role in ('system', 'developer') else messages -%}
{%- if told or tools -%}
{{- '<|start|>developer<|message|>' ~ ('# Instructions\n\n' ~ told ~ '\n\n' if told else '') -}}
{%- if tools -%}
{{- '# Tools\n\n## functions\n\nnamespace functions {\n\n' -}}
{%- for tool in tools -%}
{{- '// ' ~ tool.function.description ~ '\ntype ' ~ tool.function.name ~ ' = (_: {\n' -}}
{%- for name, spec in tool.function.parameters.properties.items() -%}{{- name ~ ': ' ~ kind(spec) ~ ',\n' -}}
{%- endfor -%}{{- '}) => any;\n\n' -}}
{%- endfor -%}{{- '} // namespace functions' -}}
{%- endif -%}{{- '<|end|>' -}}
{%- endif -%}
{%- set last = namespace(call=none) -%}
{%- for m in turns -%}
{%- if m.role == 'assistant' -%}
{%- if '<|channel|>' in m.content -%}{{ raise_exception('channels in the content') }}{%- endif -%}
{%- if m.tool_calls -%}
{%- set later = namespace(final=false) -%}
{%- for other in turns[loop.index:] -%}
{%- if other.role == 'assistant' and not other.tool_calls -%}{%- set later.final = true -%}{%- endif -%}
{%- endfor -%}
{%- if m.content and m.thinking -%}{{ raise_exception('both content and thinking') }}{%- endif -%}
{%- if m.thinking and not later.final -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' -}}
{%- endif -%}
{%- set call = m.tool_calls[0].function -%}
{{- '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' -}}
{{- call.arguments | tojson -}}{{- '<|call|>' -}}
{%- set last.call = call.name -%}
{%- else -%}
{%- set closes = loop.last and not add_generation_prompt -%}
{%- if closes and m.thinking -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ ('<|return|>' if closes else '<|end|>') -}}
{%- set last.call = none -%}
{%- endif -%}
{%- elif m.role == 'tool' -%}
{%- if last.call is none -%}{{ raise_exception('a result without a call') }}{%- endif -%}
{{- '<|start|>functions.' ~ last.call ~ ' to=assistant<|channel|>commentary<|message|>' -}}
{{- m.content | tojson -}}{{- '<|end|>' -}}
{%- elif m.role == 'user' -%}{{- '<|start|>user<|message|>' ~ m.content ~ '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{{- '<|start|>assistant' if add_generation_prompt else '' -}}
"""
# What it writes before the chat: by hand.
HEAD = (
    "<|start|>system<|message|>You are a model.\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
ADD = "\nCalls to these tools must go to the commentary channel: 'functions'."


def make_harmony_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens([AddedToken(f"<|{mark}|>", special=True, normalized=False) for mark in MARKS])
    tokenizer.eos_token = "<|return|>"
    tokenizer.chat_template = TEMPLATE.strip()
    return tokenizer
