"""Chat templates cut down to what tells families apart: how they show a call. The wording follows those in use."""

from __future__ import annotations

TEMPLATES = {
    "hermes": """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "llama-json": """{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content }}{%- for call in message.tool_calls %}{{- '{"name": "' + call.function.name + '", ' }}
{{- '"parameters": ' }}{{- call.function.arguments | tojson }}{{- '}' }}{%- endfor %}{{- '<|eot_id|>' }}{%- endfor %}
{%- if tools %}{{- 'Respond in the format {"name": function name, "parameters": dictionary}. ' }}{%- endif %}""",
    "llama-pythonic": """{%- if tools %}
{{- 'Respond in the format [func_name1(params_name1=params_value1)] ' }}{%- endif %}
{%- for message in messages %}{{- '<|header_start|>' + message.role + '<|header_end|>\\n\\n' + message.content }}
{%- if message.tool_calls %}{{- '[' }}{%- for call in message.tool_calls %}{{- call.function.name + '(' }}
{%- for key, value in call.function.arguments.items() %}{{- key + '=' }}{{- value | tojson }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ')' }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}{%- endif %}{{- '<|eot|>' }}{%- endfor %}""",
    "mistral-list": """{%- for message in messages %}{%- if message.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}{%- set out = call.function | tojson %}{{- out[:-1] }}
{%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}{{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']</s>' }}
{%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}{%- endfor %}""",
    "mistral": """{%- for message in messages %}{{- '[INST]' + message.content + '[/INST]' }}
{%- for call in message.tool_calls %}{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
{{- call.function.arguments | tojson }}{%- endfor %}{{- '</s>' }}{%- endfor %}""",
    "gemma": """{%- for message in messages %}{{- '<|turn>' + message.role + '\\n' }}
{%- for call in message.tool_calls %}
{{- '<|tool_call>call:' + call.function.name + '{' }}{%- for key, value in call.function.arguments | dictsort %}
{{- key + ':' }}{%- if value is string %}{{- '<|"|>' + value + '<|"|>' }}{%- else %}{{- value | tojson }}{%- endif %}
{%- if not loop.last %}{{- ',' }}{%- endif %}{%- endfor %}{{- '}<tool_call|>' }}{%- endfor %}
{{- message.content + '<turn|>\\n' }}{%- endfor %}""",
    "gemma-tool-code": """{%- if tools %}
{{- 'To call a function, write a block that begins with ```tool_code.' }}{%- endif %}
{%- for message in messages %}{{- '<start_of_turn>' + message.role + '\\n' + message.content }}
{%- if message.tool_calls %}{{- '```tool_code\\n' }}{%- for call in message.tool_calls %}{{- call.function.name + '(' }}
{%- for key, value in call.function.arguments.items() %}{{- key + '=' }}{{- value | tojson }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ')\\n' }}{%- endfor %}{{- '```' }}{%- endif %}
{{- '<end_of_turn>\\n' }}{%- endfor %}""",
    "phi": """{%- if tools %}{{- '<|system|><|tool|>' }}{{- tools | tojson }}{{- '<|/tool|><|end|>' }}{%- endif %}
{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content }}{%- for call in message.tool_calls %}
{{- '<|tool_call|>' }}{{- call.function | tojson }}{{- '<|/tool_call|>' }}{%- endfor %}{{- '<|end|>' }}{%- endfor %}""",
    "deepseek-r1": """{%- for message in messages %}{{- '<｜User｜>' + message.content }}{%- if message.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' }}{%- for call in message.tool_calls %}{%- if not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
{{- call.function.arguments | tojson }}{{- '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}""",
    "deepseek-v3.1": """{%- for message in messages %}{{- '<｜User｜>' + message.content }}{%- if message.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' }}{%- for call in message.tool_calls %}{{- '<｜tool▁call▁begin｜>' + call.function.name }}
{{- '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}
{%- endif %}{%- endfor %}""",
    "kimi": """{%- for message in messages %}{{- '<|im_user|>' + message.content }}{%- if message.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}{%- for call in message.tool_calls %}{{- '<|tool_call_begin|>' + call.id }}
{{- '<|tool_call_argument_begin|>' }}{{- call.function.arguments | tojson }}{{- '<|tool_call_end|>' }}{%- endfor %}
{{- '<|tool_calls_section_end|>' }}{%- endif %}{{- '<|im_end|>' }}{%- endfor %}""",
}
OTHERS = {
    "no tools at all": "{% for message in messages %}{{ '<start_of_turn>' + message.content }}{% endfor %}",
    "calls in XML": "{{ '<tool_call>\\n<function=' + name + '>\\n<parameter=' + key + '>' }}",
    "calls with a bare name": "{{ '<tool_call>' + name + '\\n<arg_key>' + key + '</arg_key>' }}",
}
