# Lists the Python packages of an image (`make sbom`). The context is the folder env.
ARG IMAGE
FROM ${IMAGE} AS list
USER 0
ARG LOCKS
COPY requirements-sbom.lock requirements-image.lock base/requirements.lock sbom_hashes.py /tmp/
RUN --mount=type=secret,id=ca_bundle --mount=type=secret,id=pip_conf \
    if [ -s /run/secrets/ca_bundle ]; then export PIP_CERT=/run/secrets/ca_bundle; fi \
 && if [ -s /run/secrets/pip_conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip_conf; fi \
 && python3 -m venv --without-pip /tmp/tool \
 && python3 -m pip --python /tmp/tool/bin/python install --quiet --progress-bar off --no-cache-dir --disable-pip-version-check \
        --root-user-action=ignore --no-deps --require-hashes -r /tmp/requirements-sbom.lock \
 && /tmp/tool/bin/python -m cyclonedx_py environment --output-reproducible --output-format JSON --output-file /tmp/sbom.cdx.json \
        /opt/venv/bin/python \
 && python3 /tmp/sbom_hashes.py /tmp/sbom.cdx.json $LOCKS
FROM scratch
COPY --from=list /tmp/sbom.cdx.json /
