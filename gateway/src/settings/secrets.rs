//! Secrets referenced by settings.
//!
//! Reads and validates the secret files. Contents are never printed, neither by `Debug` nor in errors, which name
//! setting, file and rule. Certificates belong to TLS.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use axum::http::HeaderValue;

use super::Settings;

/// Minimum length of a guessable secret.
pub const SECRET_BYTES_MIN: usize = 16;

/// Maximum length of one secret.
const SECRET_BYTES_MAX: usize = 4 << 10;

/// Maximum length of a key file.
const KEYS_BYTES_MAX: usize = 1 << 20;

/// A secret value.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Box<[u8]>);

impl Secret {
    /// Wraps the content.
    pub fn new(content: impl Into<Vec<u8>>) -> Self {
        Self(content.into().into_boxed_slice())
    }

    /// Content for hashing or sending.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The API key of workers in a file.
    ///
    /// # Errors
    /// A file that cannot be read, is no regular file, or violates the rule of keys.
    pub(crate) fn worker_key(setting: &str, file: &Path) -> Result<Self, SecretError> {
        let secret_file = SecretFile { setting: setting.to_owned(), file: file.to_owned() };
        // A read of a pipe could block a request.
        if std::fs::metadata(file).is_ok_and(|metadata| !metadata.is_file()) {
            return Err(secret_file.refused("be a regular file"));
        }
        secret_file.secret(ContentRule::Printable)
    }

    /// `Authorization: Bearer` header, marked sensitive; `None` if the content is invalid in a header.
    pub fn bearer(&self) -> Option<HeaderValue> {
        let mut value = HeaderValue::from_bytes(&[b"Bearer ", self.as_bytes()].concat()).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Invalid secret file.
#[derive(Debug, thiserror::Error)]
#[error("{setting} is {}, {problem}", .file.display())]
pub struct SecretError {
    /// Setting that references the file.
    pub setting: String,
    /// Path of the file.
    pub file: PathBuf,
    /// System error or violated rule, without content.
    pub problem: String,
}

/// All secrets of the settings.
#[derive(Clone, Debug, Default)]
pub struct Secrets {
    /// API keys of workers by file, of the gateway, of models and of workers in the settings: printable ASCII.
    pub worker_keys: BTreeMap<PathBuf, Secret>,
    /// Secret of tenant salts: at least [`SECRET_BYTES_MIN`] arbitrary bytes.
    pub salt_secret: Option<Secret>,
    /// Key shared by all replicas: at least [`SECRET_BYTES_MIN`] arbitrary bytes.
    pub replicas_key: Option<Secret>,
    /// Keys of each tenant in the order of [`Settings::tenants`]: at least one each, in the format of the operator
    /// token, unique over all tenants.
    pub tenant_keys: Vec<Vec<Secret>>,
}

impl Secrets {
    /// Reads all referenced files. Blocking.
    ///
    /// # Errors
    /// The first of [`Secrets::problems`].
    pub fn read(settings: &Settings) -> Result<Self, SecretError> {
        let (secrets, problems) = Self::gather(settings);
        problems.into_iter().next().map_or(Ok(secrets), Err)
    }

    /// Problems of all referenced files.
    pub fn problems(settings: &Settings) -> Vec<SecretError> {
        Self::gather(settings).1
    }

    fn gather(settings: &Settings) -> (Self, Vec<SecretError>) {
        let mut problems = Vec::new();
        let mut one = |setting: &str, file: Option<&Path>, rule: ContentRule| {
            let secret_file = SecretFile { setting: setting.to_owned(), file: file?.to_owned() };
            secret_file.secret(rule).map_err(|error| problems.push(error)).ok()
        };
        let worker_keys = settings
            .worker_key_files()
            .into_iter()
            .filter_map(|(setting, file)| Some((file.to_owned(), one(&setting, Some(file), ContentRule::Printable)?)));
        let worker_keys = worker_keys.collect();
        let salt_file = settings.gateway.salt_secret_file.as_deref();
        let salt_secret = one("gateway.salt_secret_file", salt_file, ContentRule::Long);
        if let Some(admin) = &settings.admin {
            // The administration listener keeps verifiers of its tokens.
            one("admin.token_file", Some(&admin.token_file), ContentRule::LongPrintable);
            one("admin.index_token_file", admin.index_token_file.as_deref(), ContentRule::LongPrintable);
            one("admin.read_token_file", admin.read_token_file.as_deref(), ContentRule::LongPrintable);
        }
        let key_file = settings.replicas.as_ref().and_then(|replicas| replicas.key_file.as_deref());
        let replicas_key = one("replicas.key_file", key_file, ContentRule::Long);
        let mut owners = BTreeMap::new();
        let tenant_keys = settings.tenants.iter().enumerate().map(|(n, tenant)| {
            let secret_file = SecretFile { setting: format!("tenants[{n}].keys_file"), file: tenant.keys_file.clone() };
            let (keys, refused) = secret_file.keys(|key| *owners.entry(key.to_vec()).or_insert(n) == n);
            problems.extend(refused);
            keys
        });
        let tenant_keys = tenant_keys.collect();
        (Self { worker_keys, salt_secret, replicas_key, tenant_keys }, problems)
    }
}

/// Content rule of a secret file.
#[derive(Clone, Copy)]
enum ContentRule {
    Printable,
    Long,
    LongPrintable,
}

impl ContentRule {
    /// The rule that `content` violates, if any.
    fn broken_by(self, content: &[u8]) -> Option<&'static str> {
        let is_long = content.len() >= SECRET_BYTES_MIN;
        let is_printable = !content.is_empty() && content.iter().all(u8::is_ascii_graphic);
        match self {
            Self::Printable => (!is_printable).then_some("hold printable ASCII characters only, without spaces"),
            Self::Long => (!is_long).then_some("hold at least 16 bytes"),
            Self::LongPrintable => (!is_long || !is_printable)
                .then_some("hold at least 16 printable ASCII characters and nothing else, without spaces"),
        }
    }
}

/// A file and the setting that references it.
struct SecretFile {
    setting: String,
    file: PathBuf,
}

impl SecretFile {
    fn secret(self, rule: ContentRule) -> Result<Secret, SecretError> {
        let content = self.content(SECRET_BYTES_MAX, "be at most 4096 bytes long")?;
        let content = content.strip_suffix(b"\n").map_or(&content[..], |rest| rest.strip_suffix(b"\r").unwrap_or(rest));
        match rule.broken_by(content) {
            None => Ok(Secret::new(content)),
            Some(rule) => Err(self.refused(rule)),
        }
    }

    /// Keys and problems of the file. `is_own` returns whether a key belongs to no other tenant.
    fn keys(self, mut is_own: impl FnMut(&[u8]) -> bool) -> (Vec<Secret>, Vec<SecretError>) {
        let content = match self.content(KEYS_BYTES_MAX, "be at most 1048576 bytes long") {
            Ok(content) => content,
            Err(error) => return (Vec::new(), vec![error]),
        };
        let (mut keys, mut refused) = (Vec::new(), Vec::new());
        for (n, line) in content.split(|byte| *byte == b'\n').enumerate() {
            let key = line.strip_suffix(b"\r").unwrap_or(line);
            if key.is_empty() {
                continue;
            }
            let broken = ContentRule::LongPrintable.broken_by(key);
            match broken.or_else(|| (!is_own(key)).then_some("not be a key of another tenant")) {
                None => keys.push(Secret::new(key)),
                Some(rule) => refused.push(self.error(format!("whose line {} must {rule}", n + 1))),
            }
        }
        if keys.is_empty() && refused.is_empty() {
            refused.push(self.refused("hold at least one key, each on a line"));
        }
        (keys, refused)
    }

    fn content(&self, bytes_max: usize, rule: &'static str) -> Result<Vec<u8>, SecretError> {
        let content = read_at_most(&self.file, bytes_max + 1);
        let content = content.map_err(|error| self.error(format!("which cannot be read: {error}")))?;
        if content.len() > bytes_max { Err(self.refused(rule)) } else { Ok(content) }
    }

    fn refused(&self, rule: &'static str) -> SecretError {
        self.error(format!("which must {rule}"))
    }

    fn error(&self, problem: String) -> SecretError {
        SecretError { setting: self.setting.clone(), file: self.file.clone(), problem }
    }
}

/// The beginning of a file, of at most this length.
pub(crate) fn read_at_most(file: &Path, bytes_max: usize) -> std::io::Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(file)?.take(bytes_max as u64).read_to_end(&mut content)?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{AdminSettings, TenantSettings};

    /// A file for this test.
    fn written(name: &str, content: &[u8]) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("pointsman-secrets-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("test directory created");
        let path = directory.join(name);
        std::fs::write(&path, content).expect("file written");
        path
    }

    fn tenant(name: &str, keys_file: PathBuf) -> TenantSettings {
        TenantSettings { name: name.to_owned(), keys_file, ..TenantSettings::default() }
    }

    fn problems(settings: &Settings) -> Vec<String> {
        Secrets::problems(settings).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn files_are_read_without_their_last_line_end() {
        let mut settings = Settings::default();
        settings.gateway.worker_api_key_file = Some(written("worker", b"k\r\n"));
        settings.gateway.salt_secret_file = Some(written("salt", b"\0\xff34567890123456\n\n"));
        let token_file = written("token", b"0123456789abcdef");
        settings.admin = Some(AdminSettings { token_file, ..AdminSettings::default() });
        settings.tenants = vec![
            tenant("a", written("a", b"\naaaaaaaaaaaaaaaa\r\n\nbbbbbbbbbbbbbbbb\nbbbbbbbbbbbbbbbb\n")),
            tenant("b", written("b", b"cccccccccccccccc")),
        ];
        let secrets = Secrets::read(&settings).expect("all files are valid");
        assert_eq!(secrets.worker_keys.values().collect::<Vec<_>>(), [&Secret::new("k")]);
        assert_eq!(secrets.salt_secret, Some(Secret::new(b"\0\xff34567890123456\n")), "only one line end is removed");
        assert_eq!(secrets.tenant_keys.iter().map(Vec::len).collect::<Vec<_>>(), [3, 1]);
        assert_eq!(secrets.tenant_keys[0][0], Secret::new("aaaaaaaaaaaaaaaa"));
        let shown = format!("{secrets:?}");
        assert!(!shown.contains("aaaa") && !shown.contains("0123"), "{shown}");
    }

    #[test]
    fn invalid_files_are_named_with_the_rule_without_content() {
        let mut settings = Settings::default();
        settings.gateway.worker_api_key_file = Some(written("spaced", b"hush hush"));
        settings.gateway.salt_secret_file = Some(written("short", b"hush-hush-hush\n"));
        let token_file = written("long", &[b'h'; SECRET_BYTES_MAX + 1]);
        settings.admin = Some(AdminSettings { token_file, ..AdminSettings::default() });
        settings.tenants = vec![
            tenant("a", written("first", b"hushhushhushhush\n")),
            tenant("b", written("second", b"hush\n\nhushhushhushhush\n")),
            tenant("c", written("empty", b"\n")),
            tenant("d", PathBuf::from("/nowhere/keys")),
        ];
        let reported = problems(&settings);
        let expected = [
            ("gateway.worker_api_key_file", "hold printable ASCII characters only, without spaces"),
            ("gateway.salt_secret_file", "which must hold at least 16 bytes"),
            ("admin.token_file", "be at most 4096 bytes long"),
            ("tenants[1].keys_file", "line 1 must hold at least 16 printable ASCII characters and nothing else"),
            ("tenants[1].keys_file", "line 3 must not be a key of another tenant"),
            ("tenants[2].keys_file", "must hold at least one key, each on a line"),
            ("tenants[3].keys_file is /nowhere/keys, which cannot be read: ", ""),
        ];
        assert_eq!(reported.len(), expected.len(), "{reported:?}");
        for (reported, (setting, rule)) in reported.iter().zip(expected) {
            assert!(
                reported.starts_with(setting) && reported.contains(rule) && !reported.contains("hush"),
                "{reported}"
            );
        }
        assert_eq!(Secrets::read(&settings).expect_err("refused").to_string(), reported[0]);
    }

    #[test]
    fn bearer_headers_are_sensitive() {
        let secret = Secret::new("0123456789abcdef");
        let bearer = secret.bearer().expect("printable");
        assert_eq!(bearer.as_bytes(), b"Bearer 0123456789abcdef");
        assert!(bearer.is_sensitive());
        assert_eq!(Secret::new("a\nb").bearer(), None);
    }
}
