"""llama.cpp's server on a port, as xllamacpp has it, until it is ended.

python -m benchmarks.serving_peer FILE.gguf PORT
"""

import signal
import sys

import xllamacpp

THREADS, SLOTS, CONTEXT = 2, 32, 640

if __name__ == "__main__":
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.hostname, params.port = "127.0.0.1", int(sys.argv[2])
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * CONTEXT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.warmup = True
    server = xllamacpp.Server(params)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        signal.pause()
