//! The secrets that settings name files of.
//!
//! Owns reading these files and what their content must be. Promises that content is never printed: not by `Debug`, not
//! by errors, which name the setting, the file and the rule. Leaves certificates to TLS, and who may do what to whoever
//! compares.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use axum::http::HeaderValue;
use ring::hmac;

use super::Settings;

/// Fewest bytes of a secret that somebody could try to guess.
pub const SECRET_BYTES_MIN: usize = 16;

/// Most bytes of one secret.
const SECRET_BYTES_MAX: usize = 4 << 10;

/// Most bytes of a file of keys.
const KEYS_BYTES_MAX: usize = 1 << 20;

/// What only those may know who are meant to.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Box<[u8]>);

impl Secret {
    /// A secret with this content.
    #[must_use]
    pub fn new(content: impl Into<Vec<u8>>) -> Self {
        Self(content.into().into_boxed_slice())
    }

    /// Its content, for whoever hashes or sends it.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether `shown` is the same. The time it takes says nothing of the secret.
    ///
    /// ```
    /// use pointsman_gateway::settings::Secret;
    ///
    /// let secret = Secret::new("0123456789abcdef");
    /// assert!(secret.is(b"0123456789abcdef"));
    /// assert!(!secret.is(b"0123456789abcdeF"));
    /// assert_eq!(format!("{secret:?}"), "Secret(..)");
    /// ```
    #[must_use]
    pub fn is(&self, shown: &[u8]) -> bool {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.0);
        let tag = hmac::sign(&key, shown);
        hmac::verify(&key, &self.0, tag.as_ref()).is_ok()
    }

    /// `Authorization: Bearer` with it, marked so that nobody prints it; `None` where it cannot stand in a header.
    #[must_use]
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

/// A file that is not what it must be.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// It cannot be read.
    #[error("{setting} is {}, which cannot be read: {error}", .file.display())]
    Unreadable {
        /// The setting that names it.
        setting: String,
        /// The file.
        file: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// Its content breaks a rule.
    #[error("{setting} is {}, which must {rule}", .file.display())]
    Content {
        /// The setting that names it.
        setting: String,
        /// The file.
        file: PathBuf,
        /// The rule.
        rule: &'static str,
    },
    /// A line of it breaks a rule.
    #[error("{setting} is {}, whose line {line} must {rule}", .file.display())]
    Line {
        /// The setting that names it.
        setting: String,
        /// The file.
        file: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The rule.
        rule: &'static str,
    },
}

/// Every secret of the settings.
#[derive(Clone, Debug, Default)]
pub struct Secrets {
    /// What workers want to be shown: printable ASCII.
    pub worker_api_key: Option<Secret>,
    /// What tenants' salts are derived from: at least [`SECRET_BYTES_MIN`] bytes of any kind.
    pub salt_secret: Option<Secret>,
    /// What operators show: printable ASCII, at least [`SECRET_BYTES_MIN`] bytes.
    pub admin_token: Option<Secret>,
    /// What clients of each tenant show, in the order of [`Settings::tenants`]: at least one each, as operators' token,
    /// and none of two tenants.
    pub tenant_keys: Vec<Vec<Secret>>,
}

impl Secrets {
    /// Reads every file that the settings name. Waits for the disk.
    ///
    /// # Errors
    /// The first of [`Secrets::problems`].
    pub fn read(settings: &Settings) -> Result<Self, SecretError> {
        let (secrets, problems) = Self::gather(settings);
        problems.into_iter().next().map_or(Ok(secrets), Err)
    }

    /// Every file that is not what it must be.
    #[must_use]
    pub fn problems(settings: &Settings) -> Vec<SecretError> {
        Self::gather(settings).1
    }

    fn gather(settings: &Settings) -> (Self, Vec<SecretError>) {
        let mut problems = Vec::new();
        let mut one = |setting: &str, file: Option<&PathBuf>, rule: ContentRule| {
            let source = Source { setting: setting.to_owned(), file: file?.clone() };
            source.secret(rule).map_err(|error| problems.push(error)).ok()
        };
        let gateway = &settings.gateway;
        let worker_api_key =
            one("gateway.worker_api_key_file", gateway.worker_api_key_file.as_ref(), ContentRule::Printable);
        let salt_secret = one("gateway.salt_secret_file", gateway.salt_secret_file.as_ref(), ContentRule::Long);
        let token_file = settings.admin.as_ref().map(|admin| &admin.token_file);
        let admin_token = one("admin.token_file", token_file, ContentRule::LongPrintable);
        let mut owners = BTreeMap::new();
        let tenant_keys = settings.tenants.iter().enumerate().map(|(n, tenant)| {
            let source = Source { setting: format!("tenants[{n}].keys_file"), file: tenant.keys_file.clone() };
            let (keys, refused) = source.keys(|key| *owners.entry(key.to_vec()).or_insert(n) == n);
            problems.extend(refused);
            keys
        });
        let tenant_keys = tenant_keys.collect();
        (Self { worker_api_key, salt_secret, admin_token, tenant_keys }, problems)
    }
}

/// What the content of a file must be.
#[derive(Clone, Copy)]
enum ContentRule {
    Printable,
    Long,
    LongPrintable,
}

impl ContentRule {
    /// The rule that `content` breaks, if any.
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

/// A file, and the setting that names it.
struct Source {
    setting: String,
    file: PathBuf,
}

impl Source {
    fn secret(self, rule: ContentRule) -> Result<Secret, SecretError> {
        let content = self.content(SECRET_BYTES_MAX, "be at most 4096 bytes long")?;
        let content = content.strip_suffix(b"\n").map_or(&content[..], |rest| rest.strip_suffix(b"\r").unwrap_or(rest));
        match rule.broken_by(content) {
            None => Ok(Secret::new(content)),
            Some(rule) => Err(self.refused(rule)),
        }
    }

    /// Its keys, and what is wrong with it. `is_own` says whether a key is nobody else's.
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
                Some(rule) => {
                    let (setting, file) = (self.setting.clone(), self.file.clone());
                    refused.push(SecretError::Line { setting, file, line: n + 1, rule });
                }
            }
        }
        if keys.is_empty() && refused.is_empty() {
            refused.push(self.refused("hold at least one key, each on a line"));
        }
        (keys, refused)
    }

    fn content(&self, bytes_max: usize, rule: &'static str) -> Result<Vec<u8>, SecretError> {
        let content = read_at_most(&self.file, bytes_max + 1).map_err(|error| {
            let (setting, file) = (self.setting.clone(), self.file.clone());
            SecretError::Unreadable { setting, file, error }
        })?;
        if content.len() > bytes_max { Err(self.refused(rule)) } else { Ok(content) }
    }

    fn refused(&self, rule: &'static str) -> SecretError {
        SecretError::Content { setting: self.setting.clone(), file: self.file.clone(), rule }
    }
}

fn read_at_most(file: &Path, bytes_max: usize) -> std::io::Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(file)?.take(bytes_max as u64).read_to_end(&mut content)?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{AdminSettings, TenantSettings};

    /// A file of this test's own.
    fn written(name: &str, content: &[u8]) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("pointsman-secrets-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory of the test's own");
        let path = directory.join(name);
        std::fs::write(&path, content).expect("a file in it");
        path
    }

    fn tenant(name: &str, keys_file: PathBuf) -> TenantSettings {
        TenantSettings { name: name.to_owned(), keys_file, policy_class: None, strict_priority_max: 0 }
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
        settings.admin = Some(AdminSettings { listen: AdminSettings::default_listen(), token_file });
        settings.tenants = vec![
            tenant("a", written("a", b"\naaaaaaaaaaaaaaaa\r\n\nbbbbbbbbbbbbbbbb\nbbbbbbbbbbbbbbbb\n")),
            tenant("b", written("b", b"cccccccccccccccc")),
        ];
        let secrets = Secrets::read(&settings).expect("all are good");
        assert_eq!(secrets.worker_api_key, Some(Secret::new("k")));
        assert_eq!(secrets.salt_secret, Some(Secret::new(b"\0\xff34567890123456\n")), "one line end, not two");
        assert_eq!(secrets.admin_token, Some(Secret::new("0123456789abcdef")));
        assert_eq!(secrets.tenant_keys.iter().map(Vec::len).collect::<Vec<_>>(), [3, 1]);
        assert_eq!(secrets.tenant_keys[0][0], Secret::new("aaaaaaaaaaaaaaaa"));
        let shown = format!("{secrets:?}");
        assert!(!shown.contains("aaaa") && !shown.contains("0123"), "{shown}");
    }

    #[test]
    fn nothing_named_is_nothing_read() {
        let secrets = Secrets::read(&Settings::default()).expect("no files");
        assert!(secrets.worker_api_key.is_none() && secrets.salt_secret.is_none() && secrets.admin_token.is_none());
        assert!(secrets.tenant_keys.is_empty());
    }

    #[test]
    fn every_bad_file_is_named_with_its_rule_and_without_its_content() {
        let mut settings = Settings::default();
        settings.gateway.worker_api_key_file = Some(written("spaced", b"hush hush"));
        settings.gateway.salt_secret_file = Some(written("short", b"hush-hush-hush\n"));
        let token_file = written("long", &[b'h'; SECRET_BYTES_MAX + 1]);
        settings.admin = Some(AdminSettings { listen: AdminSettings::default_listen(), token_file });
        settings.tenants = vec![
            tenant("a", written("first", b"hushhushhushhush\n")),
            tenant("b", written("second", b"hush\n\nhushhushhushhush\n")),
            tenant("c", written("empty", b"\n")),
            tenant("d", PathBuf::from("/nowhere/keys")),
        ];
        let told = problems(&settings);
        let expected = [
            ("gateway.worker_api_key_file", "hold printable ASCII characters only, without spaces"),
            ("gateway.salt_secret_file", "which must hold at least 16 bytes"),
            ("admin.token_file", "be at most 4096 bytes long"),
            ("tenants[1].keys_file", "line 1 must hold at least 16 printable ASCII characters and nothing else"),
            ("tenants[1].keys_file", "line 3 must not be a key of another tenant"),
            ("tenants[2].keys_file", "must hold at least one key, each on a line"),
            ("tenants[3].keys_file is /nowhere/keys, which cannot be read: ", ""),
        ];
        assert_eq!(told.len(), expected.len(), "{told:?}");
        for (told, (setting, rule)) in told.iter().zip(expected) {
            assert!(told.starts_with(setting) && told.contains(rule) && !told.contains("hush"), "{told}");
        }
        assert_eq!(Secrets::read(&settings).expect_err("refused").to_string(), told[0]);
    }

    #[test]
    fn only_the_same_is_the_same() {
        let secret = Secret::new("0123456789abcdef");
        assert!(secret.is(b"0123456789abcdef"));
        for other in [&b""[..], b"0123456789abcde", b"0123456789abcdef0", b"0123456789abcdeg"] {
            assert!(!secret.is(other));
        }
        let bearer = secret.bearer().expect("printable");
        assert_eq!(bearer.as_bytes(), b"Bearer 0123456789abcdef");
        assert!(bearer.is_sensitive());
        assert_eq!(Secret::new("a\nb").bearer(), None);
    }
}
