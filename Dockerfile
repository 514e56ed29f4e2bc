# One image for all three services. BASE_IMAGE has Python, PyTorch, CUDA, cuDNN and NCCL; all other packages come from the lock.
#   make image                       builds trainer:local on the base that .env names (`make up` writes it), for x86-64 only
#   drivers older than 580           BASE_IMAGE=pytorch/pytorch:2.13.0-cuda12.6-cudnn9-runtime@sha256:6acf597eeb8e376a96580dde4952f37cc017fef732bb40bfc73f28f25e3f64b4
#                                    (and CUDA_VERSION=12.6 in env/versions.env; see docs/containers.md)
#   registry not reachable           make base, then BASE_IMAGE=trainer-base:2.13.0-cuda13.0
ARG BASE_IMAGE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime@sha256:db80a41f8428644cebcb3d75b0b62df334ab6c0e75785951eb25f48bfbd42407
# Two builds give the same layers. So all files that a build writes have this date, and modes that do not depend on the checkout. It is
# not the date of the commit: then each commit would change all layers.
ARG FILE_DATE=2020-01-01T00:00:00Z

# The base's Python is externally managed, so further packages are in a venv, which also sees the base's torch.
# Bytecode is made here and below, because the services run on a read-only root. Python uses it without checking the dates of the sources.
# compileall fails for the files in some packages that are templates and no Python; pip would skip them too. pip check ends the build for
# requirements that are missing, except those that the base itself lacks.
FROM ${BASE_IMAGE} AS venv
ARG FILE_DATE
ENV PYTHONDONTWRITEBYTECODE=1
RUN [ "$(uname -m)" = x86_64 ] || { echo "this image is built for x86-64 only, and this machine is $(uname -m): see 'Which machines' in" \
    "docs/containers.md" >&2; exit 1; }
RUN python3 -m venv --system-site-packages --without-pip /opt/venv
COPY env/requirements-image.lock /tmp/requirements-image.lock
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf \
    if [ -s /run/secrets/ca_bundle ]; then export PIP_CERT=/run/secrets/ca_bundle; fi \
 && if [ -s /run/secrets/pip_conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip_conf; fi \
 && pip() { python3 -m pip --python /opt/venv/bin/python --disable-pip-version-check "$@"; } \
 && pip install --progress-bar off --no-cache-dir --root-user-action=ignore --no-compile --no-deps --require-hashes \
        -r /tmp/requirements-image.lock \
 && { python3 -m pip --disable-pip-version-check check; echo 'No broken requirements found.'; } >/tmp/base-check \
 && ! pip check | grep -vxFf /tmp/base-check \
 && { PYTHONHASHSEED=0 python3 -m compileall -qq -f --invalidation-mode unchecked-hash /opt/venv/lib || true; } \
 && find /opt/venv -exec touch --no-dereference --date="$FILE_DATE" {} +
COPY env/versions.env env/check_versions.py /tmp/
RUN /opt/venv/bin/python /tmp/check_versions.py

FROM ${BASE_IMAGE} AS app
ARG FILE_DATE
WORKDIR /app
COPY env env
COPY entrypoints entrypoints
COPY common common
COPY data_pipeline data_pipeline
COPY trainer trainer
RUN PYTHONHASHSEED=0 python3 -m compileall -q -f --invalidation-mode unchecked-hash common data_pipeline trainer env \
 && chmod -R u=rwX,go=rX /app \
 && find /app -exec touch --no-dereference --date="$FILE_DATE" {} +

FROM ${BASE_IMAGE} AS trainer
# PYTHONSAFEPATH: Python imports nothing from the working directory, which may be the run folder of a stranger.
ENV LANG=C.UTF-8 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/app PYTHONSAFEPATH=1 \
    PATH=/app/entrypoints:/opt/venv/bin:$PATH

# - g++ and Python's headers (70 MB): torch.compile builds C++ on CPU and a launcher for each Triton kernel on GPU, and the base has only
#   gcc. Python's static libraries (25 MB) are removed, because nothing is linked with them.
# - User 1000 is renamed if the base has one, as Ubuntu's image does.
# - All users can write to the home: it is a tmpfs in the services, RUN_UID may be any user, and runc gives a tmpfs the mode of the
#   folder below it.
# - /cache belongs to root, so that no user can replace the folder of another user in it.
# - Set-user-id and set-group-id bits are removed, because no service needs them.
# - The installed packages are listed in a file, because a mirror may not have the versions of the lock any more.
# - Logs and ldconfig's cache are emptied, because they hold dates. They are not removed: the layer would hold the date of the removal.
ARG FILE_DATE
RUN --mount=type=bind,source=env/apt,target=/tmp/apt \
    touch --date='1 second ago' /tmp/begin \
 && /tmp/apt/install && rm -f /usr/lib/python3*/config-*/libpython*.a \
 && export SOURCE_DATE_EPOCH=$(date --date="$FILE_DATE" +%s) \
 && if old=$(getent group 1000 | cut -d: -f1) && [ -n "$old" ]; then groupmod --new-name trainer "$old"; \
    else groupadd --gid 1000 trainer; fi \
 && if old=$(getent passwd 1000 | cut -d: -f1) && [ -n "$old" ]; then \
        usermod --login trainer --gid 1000 --groups '' --home /home/trainer --shell /bin/bash "$old"; \
    else useradd --uid 1000 --gid 1000 --no-create-home --shell /bin/bash trainer; fi \
 && install -d -o 1000 -g 1000 -m 1777 /home/trainer && install -d -o 1000 -g 1000 /workspace && install -d -m 1777 /cache \
 && install -d /app /opt/venv \
 && find / -xdev -perm /6000 ! -type l -exec chmod ug-s {} + \
 && dpkg-query --show --showformat='${binary:Package}=${Version}\n' >/app/apt-packages.txt \
 && find /var/log /var/cache/ldconfig -type f -newer /tmp/begin -exec truncate --size=0 {} + \
 && find / -xdev -regextype egrep -regex '/(dev|proc|sys|tmp/apt|etc/hosts|etc/resolv.conf)' -prune \
        -o -newer /tmp/begin -exec touch --no-dereference --date="$FILE_DATE" {} + \
 && rm /tmp/begin && touch --date="$FILE_DATE" /tmp

# Libraries write only to a tmpfs (home) or a volume (cache). /cache must allow execution, for the kernels that torch.compile builds.
# Each user has a folder there (trainer/machine/before_torch.py), also for the list of extension files that the user has trained
# with (trainer/extensions/trust.py). USER is set because a user id without an entry in /etc/passwd has no name.
ENV HOME=/home/trainer USER=trainer XDG_CACHE_HOME=/cache XDG_STATE_HOME=/cache

COPY --from=venv /opt/venv /opt/venv
COPY --from=app /app /app

WORKDIR /app
USER 1000:1000
# The start of a run has time for imports, compilation and the first step. The port is that of `tensorboard`.
HEALTHCHECK --start-period=300s --start-interval=5s --interval=30s --timeout=10s --retries=3 CMD ["healthcheck"]
EXPOSE 6006
ENTRYPOINT ["train"]

# Last, because it changes with every commit. env/image-arguments has the values.
ARG REVISION=unknown
ARG VERSION=unknown
ARG SOURCE=unknown
ARG CREATED=unknown
ARG LOCK_DIGEST=unknown
ARG BASE_IMAGE
ARG BASE_DIGEST=unknown
ENV CODE_REVISION=${REVISION} IMAGE_REVISION="${REVISION} on ${BASE_IMAGE}" IMAGE_BASE_DIGEST=${BASE_DIGEST}
LABEL org.opencontainers.image.title="trainer" \
      org.opencontainers.image.description="Reproducible training of language models: data preparation, training and TensorBoard" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.version="${VERSION}" \
      trainer.lock.digest="${LOCK_DIGEST}"

# For docker-compose.watch.yml and .devcontainer, with the tools of a checkout. The sources of the project change here, so Python compares
# the project's bytecode with them.
FROM trainer AS develop
USER root
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends git make python3-venv \
 && apt-get clean && rm -rf /var/lib/apt/lists/* \
 && find / -xdev -perm /6000 ! -type l -exec chmod ug-s {} + \
 && python3 -m compileall -q -f --invalidation-mode checked-hash /app/common /app/data_pipeline /app/trainer /app/env
USER 1000:1000

# The two services of docker-compose.tools.yml, which are built only when they are named.
FROM trainer AS debug
USER root
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends gdb procps \
 && apt-get clean && rm -rf /var/lib/apt/lists/* \
 && find / -xdev -perm /6000 ! -type l -exec chmod ug-s {} +
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf \
    if [ -s /run/secrets/ca_bundle ]; then export PIP_CERT=/run/secrets/ca_bundle; fi \
 && if [ -s /run/secrets/pip_conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip_conf; fi \
 && python3 -m pip --python /opt/venv/bin/python install --progress-bar off --no-cache-dir --disable-pip-version-check \
        --root-user-action=ignore --no-deps --require-hashes -r /app/env/requirements-debug.lock
# gdb would read the programs of train in train's own root, for which it has no right. The files here are the same.
RUN mkdir -p /etc/gdb && echo "set sysroot /" >>/etc/gdb/gdbinit

FROM trainer AS notebook
USER root
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf \
    if [ -s /run/secrets/ca_bundle ]; then export PIP_CERT=/run/secrets/ca_bundle; fi \
 && if [ -s /run/secrets/pip_conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip_conf; fi \
 && python3 -m pip --python /opt/venv/bin/python install --progress-bar off --no-cache-dir --disable-pip-version-check \
        --root-user-action=ignore --no-deps --require-hashes -r /app/env/requirements-notebook.lock
# A new volume takes its content and its mode from the image: the examples, and any user may write.
COPY examples/notebooks /notebooks
RUN chmod -R a+rwX /notebooks && chmod 1777 /notebooks
USER 1000:1000

FROM trainer
