#!/bin/sh
# Certificates for the connection between kube-scheduler and gputile, for clusters without cert-manager.
#
#   deploy/certificates.sh [FOLDER] [NAMESPACE]     (gputile-certificates, kube-system)
#
# Creates a CA, a server certificate for gputile and a client certificate for kube-scheduler, and prints the commands that
# create the Secrets. It changes nothing in the cluster. Run it again with the same folder to renew: the CA stays as it is.
# DAYS=365 is how long the two certificates last; the CA lasts ten years.
set -eu
umask 077

folder=${1:-gputile-certificates}
namespace=${2:-kube-system}
days=${DAYS:-365}
service=gputile-scheduler
mkdir -p "$folder"

new_key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1"; }

if [ ! -e "$folder/ca.key" ]; then
    new_key "$folder/ca.key"
    openssl req -x509 -new -key "$folder/ca.key" -out "$folder/ca.crt" -days 3650 -subj "/CN=gputile" \
        -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign"
fi

sign() { # name, subject, usage, more extensions
    new_key "$folder/$1.key"
    openssl req -new -key "$folder/$1.key" -subj "$2" -out "$folder/$1.csr"
    printf 'basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\nextendedKeyUsage=%s\n%s\n' "$3" "$4" \
        > "$folder/$1.ext"
    openssl x509 -req -in "$folder/$1.csr" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" -CAcreateserial \
        -days "$days" -extfile "$folder/$1.ext" -out "$folder/$1.crt" 2> /dev/null
    rm "$folder/$1.csr" "$folder/$1.ext"
    openssl verify -CAfile "$folder/ca.crt" "$folder/$1.crt" > /dev/null
}

full=$service.$namespace.svc
sign server "/CN=$full" serverAuth "subjectAltName=DNS:$full,DNS:$full.cluster.local,DNS:$service.$namespace,DNS:$service"
sign client "/CN=kube-scheduler" clientAuth ""

end=$(openssl x509 -in "$folder/server.crt" -noout -enddate | cut -d= -f2)
echo "# Valid until $end. Keep $folder/ca.key in a safe place, not in the cluster."
for pair in "$service-tls server" "gputile-client-tls client"; do
    set -- $pair
    echo "kubectl -n $namespace create secret generic $1 --type kubernetes.io/tls --dry-run=client -o yaml \\"
    echo "  --from-file=tls.crt=$folder/$2.crt --from-file=tls.key=$folder/$2.key --from-file=ca.crt=$folder/ca.crt \\"
    echo "  | kubectl apply -f -"
done
echo "# For a kube-scheduler that is a static pod, on every control-plane node:"
echo "#   $folder/{ca.crt,client.crt,client.key} to /etc/kubernetes/gputile/{ca.crt,tls.crt,tls.key}"
