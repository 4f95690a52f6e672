"""Chat templates with the form and the strictness of Qwen3's, Llama 3's and Mistral's, and their notation of tool calls.

Each refuses what the family's own template refuses: Qwen3's a content that is null, Llama 3's a key `tool_calls` whose
value is not a list of one call, Mistral's roles that do not alternate and call ids that are not nine characters long.
"""

from __future__ import annotations

from collections.abc import Mapping

QWEN3 = """
{%- set found = namespace(system=none, last_question=-1) %}
{%- if messages[0].role == 'system' %}
    {%- set found.system = messages[0].content %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set found.last_question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if found.system is not none %}
        {{- found.system ~ '\\n\\n' }}
    {%- endif %}
    {{- 'Functions that you may call:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' ~ tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\nA call is written as\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif found.system is not none %}
    {{- '<|im_start|>system\\n' ~ found.system ~ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set answer = message.content %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in message.content %}
            {%- set answer = message.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set thoughts = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > found.last_question and (loop.last or thoughts) %}
            {{- '<think>\\n' ~ thoughts.strip('\\n') ~ '\\n</think>\\n\\n' ~ answer.lstrip('\\n') }}
        {%- else %}
            {{- answer }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if not loop.first or answer %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if call.function %}
                    {%- set call = call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
                {%- if call.arguments is string %}
                    {{- call.arguments }}
                {%- else %}
                    {{- call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3 = """
{{- bos_token }}
{%- set tools = tools if tools is defined else none %}
{%- if messages[0]['role'] == 'system' %}
    {%- set instructions = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set instructions = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}
    {{- 'Environment: ipython\\n' }}
{%- endif %}
{{- instructions ~ '<|eot_id|>' }}
{%- if tools is not none %}
    {%- if messages | length == 0 %}
        {{- raise_exception('a chat with tools needs a message of the user') }}
    {%- endif %}
    {%- set question = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nCall one of these functions, in the form ' }}
    {{- '{"name": function name, "parameters": dictionary of arguments}.\\n\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) ~ '\\n\\n' }}
    {%- endfor %}
    {{- question ~ '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\\n\\n' ~ message['content'] | trim ~ '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('this model makes one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' ~ call.name ~ '", "parameters": ' }}
        {{- call.arguments | tojson ~ '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """
{%- if messages[0]['role'] == 'system' %}
    {%- set instructions = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set questions = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set count = namespace(turns=0) %}
{%- for message in turns %}
    {%- set calls = message.tool_calls is defined and message.tool_calls is not none %}
    {%- if message.role not in ('tool', 'tool_results') and not calls %}
        {%- if (message['role'] == 'user') != (count.turns % 2 == 0) %}
            {{- raise_exception('roles must alternate between user and assistant') }}
        {%- endif %}
        {%- set count.turns = count.turns + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == questions[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": ' ~ tool.function | tojson ~ '}' ~ (']' if loop.last else ', ') }}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and instructions is defined %}
            {{- '[INST] ' ~ instructions ~ '\\n\\n' ~ message['content'] ~ '[/INST]' }}
        {%- else %}
            {{- '[INST] ' ~ message['content'] ~ '[/INST]' }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('ids of tool calls must have 9 letters or digits') }}
            {%- endif %}
            {%- set written = call.function | tojson %}
            {{- written[:-1] ~ ', "id": "' ~ call.id ~ '"}' ~ (']' ~ eos_token if loop.last else ', ') }}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' ~ message['content'] | trim ~ eos_token }}
    {%- elif message['role'] == 'tool' or message['role'] == 'tool_results' %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('ids of tool calls must have 9 letters or digits') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' ~ message['content'] | string ~ ', "call_id": "' ~ message.tool_call_id ~ '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('the only roles are user and assistant, after an optional system message') }}
    {%- endif %}
{%- endfor %}
"""

TEMPLATES: Mapping[str, str] = {"qwen3": QWEN3, "llama3": LLAMA3, "mistral": MISTRAL}
NOTATIONS: Mapping[str, str] = {"qwen3": "hermes", "llama3": "llama3", "mistral": "mistral"}
"""Notation of the tool calls of each form."""
SPECIAL_TOKENS: Mapping[str, Mapping[str, str]] = {
    "qwen3": {"eos_token": "<|im_end|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
}
"""Entries of a tokenizer_config.json beside each form."""
