# compress on CPUs. In a checkout:
#   pip wheel --no-deps --wheel-dir dist .
#   docker build --file docs/docker/cpu.Dockerfile --tag compress dist
#   docker run --rm --volume "$PWD:/work" compress quantize MODEL --method gptq --calibration TEXT --output OUT
FROM python:3.12-slim
# Compiles the CPU kernels for the processor that it runs on, once.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# CPU builds of torch: without CUDA libraries, which take 5 GB.
ARG TORCH=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH" "torch>=2.11"
ARG WHEEL=compress_models-0.1.0-py3-none-any.whl
COPY ${WHEEL} /tmp/
RUN pip install --no-cache-dir "/tmp/${WHEEL}[all]"
# Kernels and answers of originals: mount a volume here to keep them.
ENV COMPRESS_CACHE_DIR=/cache
RUN mkdir /cache && chmod 777 /cache
WORKDIR /work
ENTRYPOINT ["compress"]
