"""S3Files: Amazon S3 and what speaks its protocol, through s3fs.

Endpoint, region, credentials and profile are those that every AWS tool reads (`AWS_ENDPOINT_URL`, `AWS_REGION`,
`AWS_ACCESS_KEY_ID`, `AWS_PROFILE`, `~/.aws`, instance roles); further options of s3fs come from fsspec's own
configuration (`FSSPEC_S3_...`, `~/.config/fsspec`). None of them is stored.
"""

from typing import Any

import fsspec.config

from llmcollect.errors import SpecError, StoreError
from llmcollect.store.objects import FsspecFiles

_LARGEST_PUT = 5 * 10**9
_WORDS = {
    "NoSuchBucket": "the bucket does not exist",
    "AccessDenied": "permission denied",
    "403": "permission denied, or the credentials are wrong",
    "InvalidAccessKeyId": "the credentials are refused: this access key does not exist there",
    "SignatureDoesNotMatch": "the credentials are refused: the secret does not belong to the access key",
    "ExpiredToken": "the credentials have expired",
    "PermanentRedirect": "the bucket is in another region: set AWS_REGION",
}


class S3Files(FsspecFiles):
    """Objects of a bucket. A name is taken by one `PUT` with `If-None-Match: *`.

    Never by a multipart upload: there are servers that ignore the condition on its completion, and overwrite.

    Raises:
        SpecError: There is no bucket in the URL, or s3fs is not installed.
    """

    def __init__(self, root: str) -> None:
        try:
            from s3fs import S3FileSystem
        except ImportError:
            raise SpecError(f"{root} needs s3fs: pip install 'llmcollect[s3]'") from None
        location = root.partition("://")[2].strip("/")
        self._bucket = location.partition("/")[0]
        if not self._bucket:
            raise SpecError(f"{root!r} names no bucket: write s3://bucket/path")
        # An instance of its own: others of the process may hold old listings.
        options = {"max_pool_connections": 32} | fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
        fs = S3FileSystem(use_listings_cache=False, skip_instance_cache=True, config_kwargs=options)
        super().__init__(root, fs, location)

    def _put(self, path: str, data: bytes) -> bool:
        if len(data) > _LARGEST_PUT:
            raise StoreError(f"{len(data)} bytes are more than one PUT may hold: lower limits.commit_bytes")
        bucket, _, key = path.partition("/")
        try:
            self._fs.call_s3("put_object", Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
        except OSError as error:
            if _status(error) == 412:
                return False
            raise
        return True

    def _is_absent(self, error: BaseException) -> bool:
        return isinstance(error, FileNotFoundError) and _code(error) != "NoSuchBucket"

    def _is_empty(self, error: BaseException) -> bool:
        return _status(error) == 416

    def _passes(self, error: BaseException) -> bool:
        from aiohttp import ClientError
        from botocore.exceptions import ConnectionError as BotoConnectionError
        from botocore.exceptions import HTTPClientError, ResponseStreamingError
        from fsspec.exceptions import FSTimeoutError

        passing = (
            HTTPClientError,
            BotoConnectionError,
            ResponseStreamingError,
            ClientError,
            FSTimeoutError,
            ConnectionError,
            TimeoutError,
        )
        # 409 is how S3 answers when two conditional requests meet; one of the next tries gets a 412.
        return isinstance(error, passing) or _status(error) >= 500 or _status(error) in (408, 409, 429)

    def _explain(self, error: BaseException) -> str:
        from botocore.exceptions import BotoCoreError, NoCredentialsError

        if isinstance(error, StoreError):
            return str(error)
        if isinstance(error, NoCredentialsError):
            return "no credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        code, status = _code(error), _status(error)
        if code in _WORDS:
            return _WORDS[code]
        if code or status:
            return f"the server answers {status or ''} {code}".replace("  ", " ")
        if isinstance(error, BotoCoreError):
            return str(error).splitlines()[0]
        return super()._explain(error)


def _response(error: BaseException) -> dict[str, Any]:
    """The server's answer, which s3fs keeps as the cause of the error that it raises."""
    found: BaseException | None = error
    while found is not None:
        response = getattr(found, "response", None)
        if isinstance(response, dict):
            return response
        found = found.__cause__
    return {}


def _code(error: BaseException) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))


def _status(error: BaseException) -> int:
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
