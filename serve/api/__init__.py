"""Protocols in front of the engine: the OpenAI-compatible HTTP API, its keys and its bounds.

openai    routes and the application
guard     what every request meets first: header bounds and the key, deny by default
parsing   one body, one `GenerationRequest`; shared rules live in `engine.SamplingParams`
formats   documents and chunks of the two endpoints
keys      API keys at rest
"""
