# A server of exported models: docker build -t serve . && docker run --rm -p 8501:8501 -p 8500:8500 \
#   -e MANYHANDS_TOKEN -v "$PWD/models:/models:ro" serve
FROM python:3.12-slim AS build
# Where to look for packages besides the usual place, such as a build of torch without CUDA.
ARG PIP_EXTRA_INDEX_URL
WORKDIR /build
COPY pyproject.toml README.md ./
COPY src ./src
RUN python -m venv /opt/manyhands \
 && /opt/manyhands/bin/pip install --no-cache-dir ".[serve]"

FROM python:3.12-slim
COPY --from=build /opt/manyhands /opt/manyhands
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin manyhands && mkdir /models
ENV PATH=/opt/manyhands/bin:$PATH PYTHONUNBUFFERED=1 MANYHANDS_HOST=0.0.0.0
USER 10001
EXPOSE 8500 8501
VOLUME /models
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s CMD \
  ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8501/v2/health/ready', timeout=2)"]
ENTRYPOINT ["manyhands"]
CMD ["serve", "/models", "--quiet"]
