# A machine with NVIDIA GPUs: docker build -t grpo-replay . && docker run --gpus all --ipc=host
#   -v ~/.cache/huggingface:/root/.cache/huggingface -v $PWD/runs:/work/runs grpo-replay train …
# The host needs a driver of release 580 or newer and the NVIDIA container toolkit. torch and vLLM
# bring their CUDA libraries; the compiler is for DeepSpeed's and Triton's kernels.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
 && apt-get install -y --no-install-recommends git pdsh openssh-client python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/grpo-replay
ENV PATH=/opt/grpo-replay/bin:$PATH

# The heavy wheels first, pinned as in pyproject.toml, so that a change of the code rebuilds little.
RUN pip install --no-cache-dir "vllm==0.32.0" "deepspeed>=0.19.8,<0.20" "transformers>=5.16.1,<5.24"
COPY . /opt/src
RUN pip install --no-cache-dir "/opt/src[vllm,lora]"

WORKDIR /work
ENTRYPOINT ["grpo-replay"]
