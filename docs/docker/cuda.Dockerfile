# compress on NVIDIA GPUs. In a checkout:
#   pip wheel --no-deps --wheel-dir dist .
#   docker build --file docs/docker/cuda.Dockerfile --tag compress:cuda dist
#   docker run --rm --gpus all --volume "$PWD:/work" compress:cuda quantize MODEL --device cuda --method gptq \
#       --calibration TEXT --output OUT
# torch brings the CUDA libraries, the host the driver.
FROM python:3.12-slim
# Compiles the CPU kernels, and what Triton launches.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG WHEEL=compress_models-0.1.0-py3-none-any.whl
COPY ${WHEEL} /tmp/
RUN pip install --no-cache-dir "/tmp/${WHEEL}[all]"
# Kernels and answers of originals: mount a volume here to keep them.
ENV COMPRESS_CACHE_DIR=/cache
RUN mkdir /cache && chmod 777 /cache
WORKDIR /work
ENTRYPOINT ["compress"]
