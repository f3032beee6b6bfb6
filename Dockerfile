# The framework on CUDA, with vLLM:  docker build -t lightrft_visual .
#   docker run --gpus all --shm-size 16g -v "$PWD:/work" lightrft_visual train grpo --pretrain ... --prompt_data rows.jsonl
# The development image: vLLM and Triton build kernels at their first use.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive \
    LIGHTRFT_DEVICE=cuda \
    LIGHTRFT_PYTHON=python3 \
    LIGHTRFT_CACHE=/cache

# Versions are the distribution's: its security updates are wanted.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        g++ git ninja-build python3 python3-dev python3-venv tesseract-ocr tesseract-ocr-eng \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/lightrft_visual
COPY README.md LICENSE pyproject.toml requirements.txt setup.py ./
COPY scripts ./scripts
COPY lightrft_visual ./lightrft_visual
COPY examples ./examples
RUN bash scripts/setup.sh && rm -rf ~/.cache && mkdir -p /cache

ENV PATH=/opt/lightrft_visual/.venv/bin:$PATH
WORKDIR /work
ENTRYPOINT ["lightrft-visual"]
CMD ["doctor"]
