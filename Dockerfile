# Podium in a container: small, without root, and the same for Docker, Podman, Apptainer and Kubernetes.
#
#   docker build -t podium .                                   on CPUs
#   docker build -t podium --build-arg ACCELERATOR=cu130 .     on GPUs of NVIDIA; torch brings CUDA, the node its driver
#   docker build -t podium --build-arg EXTRAS=[wandb] --build-arg PACKAGES=g++ .     engine.compile needs a compiler
#
# A workload of your own: FROM podium, then COPY your package into /opt/podium/lib/python3.11/site-packages.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG ACCELERATOR=cpu
# torch publishes its builds for one accelerator each here, and nowhere else
ARG TORCH_INDEX=https://download.pytorch.org/whl/${ACCELERATOR}
ARG CONSTRAINTS=constraints-tested.txt
ARG EXTRAS=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/podium
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt constraints-tested.txt ./
# In a layer of its own: it is large, and changes less often than Podium.
RUN /opt/podium/bin/pip install --index-url "${TORCH_INDEX}" "$(grep '^torch==' constraints.txt)+${ACCELERATOR}"
COPY src src
RUN /opt/podium/bin/pip install -c "${CONSTRAINTS}" ".${EXTRAS}" \
    && /opt/podium/bin/pip uninstall --yes pip

FROM ${BASE}
ARG PACKAGES=
# hadolint ignore=DL3008,SC2086
RUN if [ -n "${PACKAGES}" ]; then \
        apt-get update && \
        apt-get install --yes --no-install-recommends ${PACKAGES} && \
        rm -rf /var/lib/apt/lists/*; \
    fi \
    && useradd --uid 10001 --create-home podium
COPY --from=build /opt/podium /opt/podium
# Which devices a container sees, for container runtimes that ask the image; of no meaning without GPUs.
ENV PATH=/opt/podium/bin:${PATH} PYTHONUNBUFFERED=1 NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /home/podium
CMD ["podium", "--help"]
