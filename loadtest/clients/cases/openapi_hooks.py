"""What schemathesis asks names a model that is served, and wants short answers, so that it reaches the engine and comes
back. What is wrong about a request stays wrong."""

import os

import schemathesis

MODEL = os.environ["PENSTOCK_MODEL"]
LONGEST = 8
LIMITS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}


@schemathesis.hook
def map_body(context, body):
    if isinstance(body, dict):
        if isinstance(body.get("model"), str):
            body["model"] = MODEL
        names = {"max_tokens", "max_completion_tokens", "max_output_tokens"} & set(body)
        for name in names:
            if type(body[name]) is int and body[name] > LONGEST:
                body[name] = LONGEST
        if not names and context.operation.path in LIMITS:
            body[LIMITS[context.operation.path]] = LONGEST
    return body


@schemathesis.hook
def map_path_parameters(context, path_parameters):
    if path_parameters and isinstance(path_parameters.get("name"), str):
        path_parameters["name"] = MODEL
    return path_parameters
