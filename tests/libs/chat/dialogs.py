"""Templates whose loops look around: at the end, at their neighbours, at what an earlier round left, at variables.

The wording follows those in use.
"""

from __future__ import annotations

from .formats.templates import TEMPLATES as FAMILIES
from .tiny import TEMPLATE

LOOKING = {
    "own": TEMPLATE,
    "neighbours": """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- endif %}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or
    (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant' }}
{%- for tool_call in message.tool_calls %}{%- if tool_call.function is defined %}
{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>' + tool_call.name }}{{- tool_call.arguments | tojson }}
{%- if not loop.last %}{{- ',' }}{%- endif %}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>' + message.content }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "last question": """{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.searching and message.role == 'user' and message.content is string
    and not message.content.startswith('<tool_response>') %}
{%- set ns.searching = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{%- set reasoning = message.reasoning_content | default('', true) %}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<|im_start|>assistant\\n<think>' + reasoning.strip('\\n') + '</think>' + message.content }}
{%- else %}{{- '<|im_start|>assistant\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}{{- '<tool_call>' + call.function.name }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "state": """{{- bos_token }}{%- set ns = namespace(tool=false, first=true, system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- set ns.system = ns.system + message['content'] %}{%- endif %}{%- endfor %}{{- ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.tool = false %}{{- '<User>' + message['content'] }}
{%- elif message['role'] == 'tool' %}{%- set ns.tool = true %}
{%- if ns.first %}{{- '<outputs>' }}{%- set ns.first = false %}{%- endif %}{{- '<output>' + message['content'] }}
{%- elif message['role'] == 'assistant' %}{%- if ns.tool %}{{- '</outputs>' }}{%- set ns.tool = false %}{%- endif %}
{%- set content = message['content'] %}{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}
{%- endif %}{{- '<Assistant>' + content }}{%- for call in message['tool_calls'] %}
{{- call['function']['name'] + call['function']['arguments'] + ('' if loop.last else ', ') }}{%- endfor %}
{{- '<end>' }}{%- endif %}{%- endfor %}
{%- if ns.tool %}{{- '</outputs>' }}{%- endif %}{%- if add_generation_prompt %}{{- '<Assistant>' }}{%- endif %}""",
    "taking turns": """{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}
{%- set said = messages[1:] %}{%- else %}{%- set said = messages %}{%- endif %}
{%- for message in said %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) and message.role not in ('tool', 'assistant') %}
{{- raise_exception('Roles must alternate') }}{%- endif %}
{%- if loop.first and system is defined %}{%- set content = system + message['content'] %}
{%- else %}{%- set content = message['content'] %}{%- endif %}
{{- '<start_of_turn>' + message['role'] + '\\n' + content | trim + '<end_of_turn>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}""",
    "tools at the last question": """{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}{%- if message['role'] == 'user' %}
{%- if tools and message == users[-1] %}{{- '[TOOLS]' }}{{- tools | tojson }}{%- endif %}
{{- '[INST]' + message['content'] + '[/INST]' }}{%- else %}{{- ' ' + message['content'] + '</s>' }}{%- endif %}
{%- endfor %}""",
    "macros": """{%- macro show(message, last) %}{{- message.role + ':' + message.content }}
{%- if last %}{{- '$' }}{%- endif %}
{%- if messages[1] is defined %}{{- messages[1].content }}{%- endif %}{%- endmacro %}
{%- for message in messages %}{{- show(message, loop.last) }}{%- endfor %}{{- '#' + show(messages[-1], false) }}""",
}
"""Of these the last rounds may change with later messages."""
ODD = {
    "counts": "{% for m in messages %}{{ loop.index }}/{{ messages | length }} {{ loop.revindex }};{% endfor %}",
    "length of the loop": "{% for m in messages[1:] %}{{ loop.length }}{{ m.content }}{% endfor %}",
    "neighbours of the loop": "{% for m in messages %}{{ loop.previtem.role }}{{ m.content }}{{ loop.nextitem.role }}"
    "{{ loop.cycle('a', 'b', 'c') }}{{ loop.first }}{{ loop.depth }}{% endfor %}",
    "changes": "{% for m in messages %}{{ loop.changed(m.role) }}{{ m.content }}{% endfor %}",
    "nested": "{% for m in messages %}{{ m.content }}{% for n in messages %}{{ n.role }}{{ loop.index }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}{{ loop.index }}{% endfor %}",
    "reads itself": "{% for m in messages %}{{ x }}{% set x = m.content %}{{ x }}{% endfor %}{{ x }}",
    "a generator": "{% set left = messages | map(attribute='role') %}{% for m in messages %}"
    "{{ left | first }}{% endfor %}",
    "kept messages": "{% set ns = namespace(last=none) %}{% for m in messages %}{{ ns.last.role if ns.last else '' }}"
    "{% set ns.last = m %}{{ m.content }}{% endfor %}",
    "breaks": "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{{ m.content }}{% endfor %}!",
    "skips": "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}!",
    "else": "{% for m in messages[2:] %}{{ m.content }}{% else %}none{% endfor %}",
    "tests": "{{ messages is sequence }}{{ messages is iterable }}{{ messages is mapping }}{{ messages is string }}"
    "{% for m in messages %}{{ m is mapping }}{{ m.content is string }}{{ m.nothing is defined }}{% endfor %}",
    "contains": "{% for m in messages %}{{ m in messages }}{{ 'tool_calls' in m }}{{ m == messages[0] }}{% endfor %}",
    "prints": "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages }}{{ messages | tojson }}",
    "joins": "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | map(attribute='role') | join }}"
    "{{ messages | last }}{{ (messages | first).content }}{{ (messages + messages) | length }}",
    "filters": "{% for m in messages if m.role == 'user' %}{{ m.content }}{{ loop.last }}{% endfor %}",
    "backwards": "{% for m in messages | reverse %}{{ m.content }}{% endfor %}{% for m in messages[:-1] %}{{ m.role }}"
    "{% endfor %}{% for m in messages[0:2] %}{{ m.content }}{{ loop.last }}{% endfor %}",
    "two loops": "{% for m in messages %}{{ m.role }}{% endfor %}|{% for m in messages %}{{ m.content }}{% endfor %}",
    "branches": "{% if tools %}{% macro f(m) %}T{{ m.content }}{% endmacro %}{% set a = 1 %}{% else %}{% macro f(m) %}"
    "{{ m.content }}{% endmacro %}{% endif %}{% for m in messages %}{{ f(m) }}{{ a }}{% endfor %}",
    "attributes": "{% for m in messages %}{{ m.items() | list | length }}{{ m.get('content') }}{{ m.get('x', 1) }}"
    "{{ m['role'] }}{{ m.append is defined }}{{ messages.append is defined }}{{ messages.x is defined }}{% endfor %}",
    "refuses": "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no ' + m.content) }}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "inside": "{% filter upper %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfilter %}"
    "{% set all %}{% for m in messages %}{{ m.role }}{% endfor %}{% endset %}{{ all }}",
    "the loop itself": "{% for m in messages %}{% set outer = loop %}{{ m.content }}{% for c in 'ab' %}"
    "{{ outer.index }}{{ loop.index }}{% endfor %}{% endfor %}{{ loop }}",
    "types": "{% set ns = namespace(x=0) %}{% for m in messages %}"
    "{% set ns.x = ns.x + 1.5 if m.role == 'user' else true %}{{ ns.x }}{% endfor %}",
    "a namespace of each round": "{% set all = namespace(n=0) %}{% for m in messages %}"
    "{% set own = namespace(v=m.content) %}{% set all.n = all.n + own.v | length %}{{ all.n }}{% endfor %}",
    "an outer loop in an inner one's else": "{% for m in messages %}{{ m.content }}{% for c in [] %}{% else %}"
    "{{ loop.index }}{% endfor %}{% for c in 'abc' if loop.index0 %}{{ c }}{% endfor %}{% endfor %}",
}
ASKING = {
    "in each round": "{% for m in messages %}{{ m.content }}{{ style }}{{ add_generation_prompt }}{% endfor %}",
    "in the head": "{{ style | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "in a name": "{% set kept = style %}{% for m in messages %}{{ kept | tojson }}{{ m.role }}{% endfor %}",
    "in a namespace": "{% set ns = namespace(n=style) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% set ns.n = depth %}{% endif %}{{ ns.n }}{% endfor %}",
    "in a macro": "{% macro show(m) %}{{ m.content }}{{ style }}{% if add_generation_prompt %}!{% endif %}"
    "{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
    "in its order": "{% for m in messages %}{{ m.content }}{% if style is mapping %}{% for key in style %}{{ key }}"
    "{% endfor %}{% endif %}{% endfor %}",
    "in its type": "{% for m in messages %}{{ style is number }}{{ style is string }}{{ style is boolean }}"
    "{{ style is defined }}{{ style is float }}{% endfor %}",
    "as a choice": "{% for m in messages %}{% if m.role == 'assistant' and not (loop.last and style) %}{{ m.content }}"
    "{% elif depth %}{{ m.reasoning_content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{{ style }}{% endif %}",
    "as the loop's rounds": "{% for m in messages if style %}{{ m.content }}{% endfor %}"
    "{% for m in (messages if depth else messages[1:]) %}{{ m.role }}{% endfor %}",
}
"""Of what the client says besides messages and tools."""
EVERY = {**FAMILIES, **LOOKING, **ODD, **ASKING}
