# Roost in a container: `docker build --target cpu -t roost:cpu .`, or `--target cuda -t roost:cuda`.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS source
RUN pip install --no-cache-dir uv
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN uv venv --seed --python /usr/local/bin/python /opt/roost

FROM source AS build-cpu
RUN uv pip install --no-cache --python /opt/roost/bin/python --torch-backend cpu '.[server]'

# The plain index's torch is for CUDA, and brings its libraries and Triton.
FROM source AS build-cuda
RUN uv pip install --no-cache --python /opt/roost/bin/python '.[server]'

# /cache keeps the default model and compiled kernels: give it a volume.
FROM python:${PYTHON_VERSION}-slim AS runtime
RUN useradd --system --uid 10001 --home-dir /cache roost && install -d -o roost /cache
ENV PATH=/opt/roost/bin:$PATH ROOST_CACHE=/cache TRITON_CACHE_DIR=/cache/triton
USER roost
WORKDIR /cache
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=10s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=15)"]
ENTRYPOINT ["roost"]
CMD ["serve", "--host", "0.0.0.0"]

# Triton compiles the start of each kernel with a C compiler.
FROM runtime AS cuda
USER root
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER roost
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/roost /opt/roost

FROM runtime AS cpu
COPY --from=build-cpu /opt/roost /opt/roost
